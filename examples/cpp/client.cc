// Text and tokens over gRPC, with stubs made of the .proto files. Run: make && ./client
#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>
#include <google/rpc/error_details.pb.h>
#include <google/rpc/status.pb.h>
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>

#include "tokenwire/completion/v1/completion.grpc.pb.h"
#include "tokenwire/engine/v1/engine.grpc.pb.h"

namespace completion = tokenwire::completion::v1;
namespace engine = tokenwire::engine::v1;

std::shared_ptr<grpc::Channel> connect(const char* variable, const char* target) {
  const char* set = std::getenv(variable);
  grpc::ChannelArguments arguments;
  // Prompts with logprobs can be larger than the 4 MiB that gRPC accepts by default.
  arguments.SetMaxReceiveMessageSize(64 << 20);
  return grpc::CreateCustomChannel(set ? set : target, grpc::InsecureChannelCredentials(), arguments);
}

void give_a_minute(grpc::ClientContext& context) {
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(1));
}

grpc::Status complete(completion::CompletionService::Stub& stub,
                      const completion::GenerateRequest& request, std::string& text) {
  grpc::ClientContext context;  // context.TryCancel(), from any thread, cancels the request
  give_a_minute(context);
  auto stream = stub.Generate(&context, request);
  completion::GenerateResponse response;
  while (stream->Read(&response)) text += response.delta().text();
  return stream->Finish();
}

grpc::Status generate(engine::EngineService::Stub& stub, const engine::GenerateRequest& request,
                      google::protobuf::ListValue& ids) {
  grpc::ClientContext context;
  give_a_minute(context);
  auto stream = stub.Generate(&context, request);
  engine::GenerateResponse response;
  while (stream->Read(&response)) {
    for (auto id : response.delta().tokens().ids()) ids.add_values()->set_number_value(id);
  }
  return stream->Finish();
}

// Reads the typed details that every error has.
google::protobuf::Struct refusal_of(const grpc::Status& status) {
  google::protobuf::Struct refusal;
  auto& fields = *refusal.mutable_fields();
  fields["code"].set_number_value(status.error_code());
  fields["message"].set_string_value(status.error_message());
  google::rpc::Status details;
  details.ParseFromString(status.error_details());
  for (const auto& detail : details.details()) {
    google::rpc::ErrorInfo info;
    google::rpc::BadRequest bad_request;
    if (detail.UnpackTo(&info)) fields["reason"].set_string_value(info.reason());
    if (detail.UnpackTo(&bad_request)) {
      fields["field"].set_string_value(bad_request.field_violations(0).field());
    }
  }
  return refusal;
}

void expect(const grpc::Status& status) {
  if (!status.ok()) throw std::runtime_error(status.error_message());
}

int main() try {
  completion::CompletionService::Stub completions(connect("TOKENIZER", "127.0.0.1:50051"));
  engine::EngineService::Stub tokens(connect("ENGINE", "127.0.0.1:50052"));
  google::protobuf::Struct output;
  auto& fields = *output.mutable_fields();

  completion::GenerateRequest prompt;
  prompt.mutable_prompts()->add_items()->set_text("def read_json(path):\n");
  prompt.mutable_sampling()->set_temperature(0);
  prompt.mutable_stopping()->set_max_tokens(32);
  expect(complete(completions, prompt, *fields["text"].mutable_string_value()));

  engine::GenerateRequest ids;
  auto* only = ids.add_prompts();
  for (auto id : {100, 101, 102}) only->add_ids(id);
  ids.mutable_sampling()->set_temperature(0);
  ids.mutable_stopping()->set_max_tokens(8);
  ids.mutable_stopping()->set_ignore_eos(true);
  expect(generate(tokens, ids, *fields["ids"].mutable_list_value()));

  completion::GenerateRequest hot = prompt;
  hot.mutable_sampling()->set_temperature(9);
  std::string none;
  *fields["refusal"].mutable_struct_value() = refusal_of(complete(completions, hot, none));

  std::string json;
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  if (!google::protobuf::util::MessageToJsonString(output, &json, options).ok()) return 1;
  std::cout << json;
} catch (const std::exception& error) {
  std::cerr << error.what() << "\n";
  return 1;
}

// Text and tokens over gRPC from the .proto files alone. Run: npm install && node client.js
const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");
const googleProtos = require("google-proto-files");

const PROTOS = process.env.PROTOS ?? path.join(__dirname, "..", "..", "protos");
const GOOGLE = path.dirname(googleProtos.getProtoPath()); // holds google/rpc/*.proto
const TOKENIZER = process.env.TOKENIZER ?? "127.0.0.1:50051";
const ENGINE = process.env.ENGINE ?? "127.0.0.1:50052";

const definition = loader.loadSync(
  [
    "tokenwire/completion/v1/completion.proto",
    "tokenwire/engine/v1/engine.proto",
    "google/rpc/status.proto",
    "google/rpc/error_details.proto",
  ],
  { includeDirs: [PROTOS, GOOGLE], keepCase: true, longs: Number, enums: String, oneofs: true },
);
const { tokenwire, google } = grpc.loadPackageDefinition(definition);

// The trailers of every error carry a google.rpc.Status with typed details.
function detailsOf(error) {
  const [bytes] = error.metadata.get("grpc-status-details-bin");
  if (bytes === undefined) return {};
  const found = {};
  for (const any of deserialize("google.rpc.Status", bytes).details) {
    const type = any.type_url.split("/").pop();
    found[type.split(".").pop()] = deserialize(type, any.value);
  }
  return found;
}

function deserialize(type, bytes) {
  return definition[type].deserialize(bytes);
}

async function complete(client, request) {
  let text = "";
  for await (const response of client.Generate(request)) {
    if (response.event === "delta") text += response.delta.text;
  }
  return text;
}

async function generate(client, request) {
  const ids = [];
  for await (const response of client.Generate(request)) {
    if (response.event === "delta") ids.push(...response.delta.tokens.ids);
  }
  return ids;
}

async function main() {
  const credentials = grpc.credentials.createInsecure();
  const completions = new tokenwire.completion.v1.CompletionService(TOKENIZER, credentials);
  const engine = new tokenwire.engine.v1.EngineService(ENGINE, credentials);

  const text = await complete(completions, {
    prompts: { items: [{ text: "def read_json(path):\n" }] },
    sampling: { temperature: 0 },
    stopping: { max_tokens: 32 },
  });
  const ids = await generate(engine, {
    prompts: [{ ids: [100, 101, 102] }],
    sampling: { temperature: 0 },
    stopping: { max_tokens: 8, ignore_eos: true },
  });

  let refusal;
  try {
    await complete(completions, { prompts: { items: [{ text: "x" }] }, sampling: { temperature: 9 } });
  } catch (error) {
    const details = detailsOf(error);
    refusal = {
      code: grpc.status[error.code],
      message: error.details,
      reason: details.ErrorInfo?.reason,
      field: details.BadRequest?.field_violations[0].field,
    };
  }

  console.log(JSON.stringify({ text, ids, refusal }, null, 2));
  completions.close();
  engine.close();
}

main().catch((error) => {
  console.error(error.message);
  process.exitCode = 1;
});

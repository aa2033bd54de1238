// Text and tokens over gRPC, with stubs made of the .proto files. Run: make && go mod tidy && go run .
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	completion "tokenwire/completion/v1"
	engine "tokenwire/engine/v1"
	types "tokenwire/types/v1"
)

// Prompts with logprobs can be larger than the 4 MiB that grpc-go accepts by default.
var messageLimit = grpc.MaxCallRecvMsgSize(64 << 20)

type refusal struct {
	Code    string `json:"code"`
	Message string `json:"message"`
	Reason  string `json:"reason"`
	Field   string `json:"field"`
}

func main() {
	log.SetFlags(0)
	text := connect("TOKENIZER", "127.0.0.1:50051")
	defer text.Close()
	tokens := connect("ENGINE", "127.0.0.1:50052")
	defer tokens.Close()

	// The deadline holds for all calls below. Leaving main cancels what still runs.
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()

	answer, err := complete(ctx, completion.NewCompletionServiceClient(text), &completion.GenerateRequest{
		Input:    prompt("def read_json(path):\n"),
		Sampling: &types.SamplingParams{Temperature: proto.Float32(0)},
		Stopping: &types.StoppingParams{MaxTokens: proto.Uint32(32)},
	})
	if err != nil {
		log.Fatal(err)
	}
	ids, err := generate(ctx, engine.NewEngineServiceClient(tokens), &engine.GenerateRequest{
		Prompts:  []*types.TokenIds{{Ids: []uint32{100, 101, 102}}},
		Sampling: &types.SamplingParams{Temperature: proto.Float32(0)},
		Stopping: &types.StoppingParams{MaxTokens: proto.Uint32(8), IgnoreEos: true},
	})
	if err != nil {
		log.Fatal(err)
	}
	_, err = complete(ctx, completion.NewCompletionServiceClient(text), &completion.GenerateRequest{
		Input:    prompt("x"),
		Sampling: &types.SamplingParams{Temperature: proto.Float32(9)},
	})
	output, err := json.MarshalIndent(map[string]any{"text": answer, "ids": ids, "refusal": refusalOf(err)}, "", "  ")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(string(output))
}

func connect(variable, target string) *grpc.ClientConn {
	if set := os.Getenv(variable); set != "" {
		target = set
	}
	connection, err := grpc.Dial(target, grpc.WithInsecure(), grpc.WithDefaultCallOptions(messageLimit))
	if err != nil {
		log.Fatal(err)
	}
	return connection
}

func prompt(text string) *completion.GenerateRequest_Prompts {
	items := []*completion.Prompt{{Prompt: &completion.Prompt_Text{Text: text}}}
	return &completion.GenerateRequest_Prompts{Prompts: &completion.Prompts{Items: items}}
}

func complete(ctx context.Context, client completion.CompletionServiceClient, request *completion.GenerateRequest) (string, error) {
	stream, err := client.Generate(ctx, request)
	if err != nil {
		return "", err
	}
	text := ""
	for {
		response, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return text, nil
		}
		if err != nil {
			return text, err
		}
		text += response.GetDelta().GetText()
	}
}

func generate(ctx context.Context, client engine.EngineServiceClient, request *engine.GenerateRequest) ([]uint32, error) {
	stream, err := client.Generate(ctx, request)
	if err != nil {
		return nil, err
	}
	var ids []uint32
	for {
		response, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return ids, nil
		}
		if err != nil {
			return ids, err
		}
		ids = append(ids, response.GetDelta().GetTokens().GetIds()...)
	}
}

// refusalOf reads the typed details that every error has.
func refusalOf(err error) refusal {
	found := status.Convert(err)
	if found.Code() == codes.OK {
		log.Fatal("the request was not refused")
	}
	result := refusal{Code: found.Code().String(), Message: found.Message()}
	for _, detail := range found.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			result.Reason = detail.GetReason()
		case *errdetails.BadRequest:
			result.Field = detail.GetFieldViolations()[0].GetField()
		}
	}
	return result
}

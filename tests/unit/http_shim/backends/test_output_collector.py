"""Output that arrived: what a request that lost its service asks for again."""

from services.http_shim.backends.output_collector import OutputCollector
from tokenwire.pb.completion.v1 import completion_pb2


def test_echo_that_arrived_alone_is_not_asked_for_again() -> None:
    """Otherwise the client of a stream whose service is lost then would get its prompt twice."""
    output = OutputCollector()
    echo = completion_pb2.ChoiceDelta(index=1, text="def", token_ids=[7], is_prompt=True)
    response = completion_pb2.GenerateResponse(delta=echo)
    output.on_event(completion_pb2.SessionEvent(response=response))
    [choice] = output.received.resumption().choices
    assert (choice.index, [*choice.generated.ids]) == (1, [])

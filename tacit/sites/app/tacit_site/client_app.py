"""At a site: hands every message to the process that has the data, and its answer back."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from tacit.sites.relay import send_request

app = ClientApp()


@app.query()
def query(message: Message, context: Context) -> Message:
    from tacit.sites.envelope import from_record, to_record

    return Message(to_record(send_request(from_record(message.content))), reply_to=message)

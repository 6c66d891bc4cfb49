package parked

// ReasonTooLarge is the one reason without a payload.
const ReasonTooLarge = "too_large"

// Advice says what a reason means and what to do about it.
type Advice struct{ What, Do string }

// Reasons are all reasons that the schema knows.
func Reasons() []string {
	return []string{"failed", "permanent", "undecodable", "unknown_type", "invalid", ReasonTooLarge, "expired", "conflict", "crashed", "behind"}
}

// AdviceFor returns the advice for a reason; docs/operations.md has more.
func AdviceFor(reason string) Advice {
	switch reason {
	case "failed":
		return Advice{"the handler failed at every attempt", "mend what the error names, then retry"}
	case "permanent":
		return Advice{"the handler, or the SQLSTATE, says that trying again cannot help", "mend the data or deploy a handler that takes it, then retry; else discard"}
	case "undecodable":
		return Advice{"the payload does not have the form that the handler reads", "deploy a decoder that reads it, then retry; else discard, and let the producer send it anew under a new ID"}
	case "unknown_type":
		return Advice{"no handler is there for its type", "deploy a consumer that has one, then retry; else discard"}
	case "invalid":
		return Advice{"its ID cannot be told, so a duplicate could not be recognised", "make sure that it had no effect yet, then retry: it goes by its topic, partition and offset; else discard"}
	case ReasonTooLarge:
		return Advice{"it is larger than MessageBytesMax; only its coordinates and key are stored", "it cannot be retried: read it from Kafka while it is there, let the producer send it anew in a smaller form or under a raised MessageBytesMax and a new ID, then discard"}
	case "expired":
		return Advice{"it is older than the dedup window: it may have been handled before, and its claim be forgotten", "look in your own tables whether it had its effect; if not, retry; else discard"}
	case "conflict":
		return Advice{"another message with the same ID and other content was handled before", "its producer uses an ID twice: compare both; retry if this one has to have its effect as well, else discard"}
	case "crashed":
		return Advice{"the process ended at every attempt", "look for the end of the process (memory, fatal error) in its log, deploy a mended one, then retry; else discard"}
	case "behind":
		return Advice{"an earlier message of its key is parked", "nothing: it follows when the first one is retried or discarded"}
	}
	return Advice{"a newer version of the schema has this reason", "see its documentation"}
}

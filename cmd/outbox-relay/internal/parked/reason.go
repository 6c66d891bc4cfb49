package parked

// ReasonTooLarge is the only reason without a payload.
const ReasonTooLarge = "too_large"

// Advice is what a reason means and what to do about it.
type Advice struct{ What, Do string }

// Reasons returns all reasons that the schema knows.
func Reasons() []string {
	return []string{"failed", "permanent", "undecodable", "unknown_type", "invalid", ReasonTooLarge, "expired", "conflict", "crashed", "behind"}
}

// AdviceFor returns the advice for a reason; docs/runbook.md has more.
func AdviceFor(reason string) Advice {
	switch reason {
	case "failed":
		return Advice{"the handler failed at every attempt", "fix what the error names, then retry"}
	case "permanent":
		return Advice{"the handler, or the SQLSTATE, says that a retry cannot succeed", "fix the data or deploy a handler that accepts it, then retry; else discard"}
	case "undecodable":
		return Advice{"the payload does not have the form that the handler reads", "deploy a decoder that reads it, then retry; else discard, and let the producer send it again under a new ID"}
	case "unknown_type":
		return Advice{"there is no handler for its type", "deploy a consumer that has one, then retry; else discard"}
	case "invalid":
		return Advice{"its ID cannot be determined, so a duplicate could not be recognised", "make sure that it had no effect yet, then retry: its ID is then its topic, partition and offset; else discard"}
	case ReasonTooLarge:
		return Advice{"it is larger than MessageBytesMax; only its coordinates and key are stored", "it cannot be retried: read it from Kafka while it is there; let the producer send it again under a new ID, in a smaller form or after you raised MessageBytesMax; then discard"}
	case "expired":
		return Advice{"it is older than the dedup window: it may have been handled before, and its claim may be forgotten", "check in your own tables whether it had its effect; if not, retry; else discard"}
	case "conflict":
		return Advice{"another message with the same ID but other content was handled before", "its producer used an ID twice: compare both; retry if this one also has to have its effect, else discard"}
	case "crashed":
		return Advice{"the process ended at every attempt", "find out from its log why the process ended (memory, fatal error), deploy a fixed one, then retry; else discard"}
	case "behind":
		return Advice{"an earlier message of its key is parked", "nothing: it follows when the first one is retried or discarded"}
	}
	return Advice{"a newer version of the schema has this reason", "see its documentation"}
}

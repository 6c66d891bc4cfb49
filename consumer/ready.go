package consumer

import (
	"encoding/json"
	"net/http"
)

// ReadyHandler answers 200 while the consumer is in its group, otherwise 503, with the Status as JSON,
// "ready", and for 503 the "reason". It queries neither the database nor Kafka. The answer contains
// no error texts: they may contain parts of payloads. The log and Status have them.
//
// It is meant for a readinessProbe. Readiness of a consumer routes no traffic; it decides whether a
// rollout proceeds. So a new replica is ready when it passed the checks of Run and joined its
// group: its configuration, its rights and its schema work. A consumer that waits for the database
// or for Kafka at its start is not ready. The state of single partitions never makes it unready,
// because another release would not help: a partition that is halted, blocked or waiting for the
// database is in the answer, and needs an alert. See Hooks.State.
//
// For a livenessProbe always answer 200: a restart fixes neither a database nor a partition that
// waits for an operator.
func ReadyHandler(c *Consumer) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		answer := struct {
			Ready  bool   `json:"ready"`
			Reason string `json:"reason,omitempty"`
			Status
		}{Status: c.Status()}
		answer.Ready = answer.Phase == PhaseConsuming
		code := http.StatusOK
		if !answer.Ready {
			code, answer.Reason = http.StatusServiceUnavailable, answer.Phase.reason()
		}
		body, err := json.Marshal(answer)
		if err != nil {
			http.Error(w, "status cannot be shown", http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "no-store")
		w.WriteHeader(code)
		_, _ = w.Write(append(body, '\n'))
	})
}

// reason describes why a phase is not ready.
func (p Phase) reason() string {
	switch p {
	case PhaseStarting:
		return "starting: the database or Kafka does not answer yet, or is being checked; the log has the error"
	case PhaseJoining:
		return "joining: not a member of the group; the log says why if it lasts"
	case PhaseDraining:
		return "draining: Run's context ended"
	default:
		return "stopped: Run was not called, or returned; its error says why"
	}
}

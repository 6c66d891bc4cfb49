package webhook

import (
	"net/http"
	"time"
)

// Verify is what happens to a delivery before the database is asked.
func (s Scheme) Verify(header http.Header, body []byte) (Event, error) {
	if err := s.once(header); err != nil {
		return Event{}, err
	}
	return s.verify(header, body)
}

// Answer is what a sender gets for an error of the engine: status and Retry-After.
func AnswerTo(err error) (status int, retryAfter time.Duration) {
	var a answer
	a.refuse(err)
	return a.status, a.retryAfter
}

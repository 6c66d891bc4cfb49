package webhook

import "net/http"

// Verify is what happens to a delivery before the database is asked.
func (s Scheme) Verify(header http.Header, body []byte) (Event, error) {
	if err := s.once(header); err != nil {
		return Event{}, err
	}
	return s.verify(header, body)
}

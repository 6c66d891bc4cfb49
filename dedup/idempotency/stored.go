package idempotency

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// state of a key, as stored in the column.
type state string

const (
	running       state = "running"
	finished      state = "finished"
	indeterminate state = "indeterminate"
	abandoned     state = "abandoned"
)

// call says what is known of the call of the phase stored.calling, as stored in the column.
type call string

const (
	repeatable call = "repeatable" // it may have been made, and may be made again
	justOnce   call = "once"       // it may have been made, and must not be made again
	happened   call = "happened"   // by a decision: the Write of its phase is next
)

// stored is a key as a statement found it.
type stored struct {
	state       state
	fingerprint []byte // see Operation.fingerprint
	phases      []string
	calling     *string // phase whose call may have been made, or happened
	call        call    // empty: none
	data        []byte
	request     []byte
	token       int64
	locked      bool
	remaining   time.Duration
	attempts    int
	status      *int
	headers     []byte
	body        []byte
	dropped     bool
	sealed      bool
	putOff      time.Duration // until the completer resumes it
	flow        string        // that claimed it; empty: none
	idle        time.Duration // since the last phase or decision
}

// read scans the row of a claim or a look, if there is one.
func read(row pgx.Row) (*stored, error) {
	s := &stored{}
	var remaining, putOff, idle float64 // in seconds: the text of an interval depends on a setting
	err := row.Scan(&s.state, &s.fingerprint, &s.phases, &s.calling, &s.data, &s.request, &s.token, &s.locked, &remaining, &s.attempts,
		&s.status, &s.headers, &s.body, &s.dropped, &s.sealed, &putOff, &s.flow, &s.call, &idle)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil //nolint:nilnil // no row is no error
	}
	if err != nil {
		return nil, err
	}
	s.remaining, s.putOff = time.Duration(remaining*float64(time.Second)), time.Duration(putOff*float64(time.Second))
	s.idle = time.Duration(idle * float64(time.Second))
	return s, nil
}

// answer returns what an existing key means for a request: its outcome, or why there is none. ok is
// false if the request may be executed.
func (o *Operation) answer(k Key, s *stored) (response Response, ok bool, err error) {
	same, err := o.matches(k, s)
	switch {
	case err != nil:
		return Response{}, true, fmt.Errorf("%w: %w", ErrUnreadable, err)
	case !same:
		return Response{}, true, ErrMismatch
	case s.state == finished && s.status == nil: // its work closed the guard, and committed
		return Response{}, true, fmt.Errorf("%w: it has no response", ErrIndeterminate)
	case s.state == finished:
		response, err := o.replay(k, s)
		if err != nil {
			return Response{}, true, fmt.Errorf("%w: %w", ErrUnreadable, err)
		}
		return response, true, nil
	case s.state == indeterminate:
		return Response{}, true, ErrIndeterminate
	case s.state == abandoned:
		return Response{}, true, ErrAbandoned
	case s.locked:
		return Response{}, true, &InProgressError{RetryAfter: max(s.remaining, time.Second).Round(time.Second)}
	}
	return Response{}, false, nil
}

func (o *Operation) replay(k Key, s *stored) (Response, error) {
	r := Response{Status: *s.status, Replayed: true, BodyDropped: s.dropped}
	headers := s.headers
	var err error
	if s.sealed && headers != nil { // one string of base64, since the column is jsonb
		var text []byte
		if err = json.Unmarshal(headers, &text); err == nil {
			headers, err = o.open(k, "headers", text, true)
		}
	}
	if err == nil && headers != nil {
		err = json.Unmarshal(headers, &r.Header)
	}
	if err != nil {
		return Response{}, fmt.Errorf("read the headers of %v: %w", k, err)
	}
	r.Body, err = o.open(k, "body", s.body, s.sealed)
	return r, err
}

// outcome is a response in its stored form.
type outcome struct {
	status  int
	headers *string // JSON; a string, since bytes would be sent as bytea where statements are not prepared
	body    []byte
	dropped bool
}

func (o *Operation) outcome(k Key, r Response, sealed bool) (outcome, error) {
	out := outcome{status: r.Status, body: r.Body}
	if r.Status != 0 && (r.Status < 200 || r.Status > 999) {
		return out, fmt.Errorf("response of %v has status %d: want 0, or 200 to 999", k, r.Status)
	}
	if len(r.Body) > o.cfg.ResponseBytesMax {
		out.body, out.dropped = nil, true
	}
	headers, err := writeHeaders(r.Header)
	if err != nil {
		return out, fmt.Errorf("%v: %w", k, err)
	}
	if sealed && headers != nil {
		text, err := o.seal(k, "headers", headers, true)
		if err != nil {
			return out, err
		}
		headers, _ = json.Marshal(text) // bytes
	}
	if headers != nil {
		out.headers = new(string(headers))
	}
	out.body, err = o.seal(k, "body", out.body, sealed)
	return out, err
}

// fingerprint returns the stored form of a fingerprint: under Seal a keyed hash, which is longer.
func (o *Operation) fingerprint(k Key) ([]byte, error) {
	if o.cfg.Seal == nil {
		return k.Fingerprint[:], nil
	}
	mac, err := o.cfg.Seal.MAC(boundFingerprint(k), nil)
	if n := len(mac); err == nil && (n <= len(k.Fingerprint) || n > 400) { // the length tells it from a hash without a key
		err = fmt.Errorf("Sealer.MAC returned %d bytes, want 33 to 400", n)
	}
	if err != nil {
		return nil, fmt.Errorf("hash the fingerprint of %v: %w", k, err)
	}
	return mac, nil
}

// matches compares a request with the stored fingerprint. Without the key of a keyed one there is no answer.
func (o *Operation) matches(k Key, s *stored) (bool, error) {
	if len(s.fingerprint) == len(k.Fingerprint) {
		return bytes.Equal(s.fingerprint, k.Fingerprint[:]), nil
	}
	if o.cfg.Seal == nil {
		return false, errNoSeal(k)
	}
	mac, err := o.cfg.Seal.MAC(boundFingerprint(k), s.fingerprint)
	return bytes.Equal(mac, s.fingerprint), err
}

func boundFingerprint(k Key) []byte { return hash("fingerprint", bound(k, ""), k.Fingerprint[:]) }

func errNoSeal(k Key) error {
	return fmt.Errorf("what is stored of %v is encrypted, and this program has no Config.Seal", k)
}

// seal encrypts a text of a key if its row is sealed. Each text is bound to its key and its column.
func (o *Operation) seal(k Key, column string, plain []byte, sealed bool) ([]byte, error) {
	return o.sealer("encrypt", k, column, plain, sealed, Sealer.Seal)
}

func (o *Operation) open(k Key, column string, text []byte, sealed bool) ([]byte, error) {
	return o.sealer("decrypt", k, column, text, sealed, Sealer.Open)
}

func (o *Operation) sealer(what string, k Key, column string, text []byte, sealed bool, do func(s Sealer, text, aad []byte) ([]byte, error)) ([]byte, error) {
	if !sealed || text == nil {
		return text, nil
	}
	if o.cfg.Seal == nil {
		return nil, errNoSeal(k)
	}
	done, err := do(o.cfg.Seal, text, bound(k, column))
	if err != nil {
		return nil, fmt.Errorf("%s the %s of %v: %w", what, column, k, err)
	}
	return done, nil
}

func bound(k Key, column string) []byte {
	return hash("seal", []byte(k.Scope), []byte(k.Operation), []byte(k.Value), []byte(column))
}

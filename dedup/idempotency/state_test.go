package idempotency_test

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// stateV1 and stateV2 are the state of one flow in two releases.
type (
	stateV1 struct {
		Charge string `json:"charge"`
		Note   string `json:"note,omitempty"`
		Meta   struct {
			Tries int `json:"tries"`
		} `json:"meta"`
		Lines []string `json:"lines"`
	}
	stateV2 struct {
		Charge string      `json:"charge"`
		Note   string      `json:"note,omitempty"`
		Fee    json.Number `json:"fee"`
		Meta   struct {
			Tries  int    `json:"tries"`
			Region string `json:"region"`
		} `json:"meta"`
		Lines []string `json:"lines"`
	}
)

// stateFlow is a release's flow, of which one phase, and no other, can be done.
func stateFlow[S any](t *testing.T, op *idempotency.Operation, works string, write map[string]func(*S)) *idempotency.Flow[S] {
	t.Helper()
	var phases []idempotency.Phase[S]
	for _, name := range []string{"one", "two", "three"} {
		phases = append(phases, idempotency.Phase[S]{Name: name, Write: func(_ context.Context, _ pgx.Tx, s *idempotency.Step[S]) error {
			if name != works {
				return errAway
			}
			write[name](&s.State)
			if name == "three" {
				text, err := json.Marshal(s.State)
				s.Finish(idempotency.Response{Status: 200, Body: text})
				return err
			}
			return nil
		}})
	}
	flow, err := idempotency.NewFlow(op, idempotency.FlowConfig[S]{StoreRequest: true, RetryAfter: time.Millisecond}, phases...)
	require.NoError(t, err)
	return flow
}

// Property: a phase that an older release executes, between two of a newer one, keeps what the
// newer one stored, except for its own changes; also if that is encrypted, and if the completer
// executes it. Row H17 of guarantees.md.
func TestStateOfANewerReleaseSurvives(t *testing.T) {
	t.Parallel()
	for name, seal := range map[string]idempotency.Sealer{"plain": nil, "sealed": newSealer(t, "new", "new")} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := newPool(t)
			release := func() *idempotency.Operation { return newOperation(t, pool, idempotency.Config{Seal: seal}) }
			first := stateFlow(t, release(), "one", map[string]func(*stateV2){"one": func(s *stateV2) {
				s.Charge, s.Note, s.Fee, s.Meta.Region, s.Meta.Tries = "c-1", "gone", "12345678901234567890.10", "eu", 1
				s.Lines = []string{"a"}
			}})
			_, err := first.Do(t.Context(), key("k"), nil)
			require.ErrorIs(t, err, errAway)
			older := stateFlow(t, release(), "two", map[string]func(*stateV1){"two": func(s *stateV1) {
				require.Equal(t, "c-1", s.Charge)
				s.Charge, s.Note, s.Meta.Tries = "c-2", "", 2
				s.Lines = append(s.Lines, "b")
			}})
			passes(t, pool, time.Hour)
			_, err = older.Complete(t.Context())
			require.ErrorIs(t, err, errAway)
			last := stateFlow(t, release(), "three", map[string]func(*stateV2){"three": func(*stateV2) {}})
			response, err := last.Do(t.Context(), key("k"), nil)
			require.NoError(t, err)
			require.JSONEq(t, `{"charge": "c-2", "fee": 12345678901234567890.10, "meta": {"tries": 2, "region": "eu"}, "lines": ["a", "b"]}`, string(response.Body))
			require.Contains(t, string(response.Body), "12345678901234567890.10")
		})
	}
}

// Property: a type that has all members is stored as it is; members of the text in another case,
// removed ones, or ones that occur twice get the value of this program.
func TestMergeState(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ text, known, changed, want string }{
		{`{"a": 1, "b": 2}`, `{"a":1}`, `{"a":1}`, `{"a": 1, "b": 2}`},
		{`{"A": 1, "b": 2}`, `{"a":1}`, `{"a":3}`, `{"a":3,"b":2}`},
		{`{"a": 1, "A": 2}`, `{"A":2,"a":1}`, `{"A":2}`, `{"A":2}`}, // a map from which one was taken
		{`{"A": 1, "a": 2, "c": 0}`, `{"a":2,"c":0}`, `{"a":2,"c":1}`, `{"a":2,"c":1}`},
		{`{"a": {"x": {"y": 1}, "z": [1]}, "b": 0}`, `{"a":{"x":{}},"b":0}`, `{"a":{"x":{}},"b":1}`, `{"a":{"x":{"y":1},"z":[1]},"b":1}`},
		{`{"a": {"x": 1}}`, `{"a":{}}`, `{"a":null}`, `{"a":null}`},
		{`{"a": [{"x": 1, "y": 2}]}`, `{"a":[{"x":1}]}`, `{"a":[{"x":2}]}`, `{"a":[{"x":2}]}`},
		{`7`, `7`, `8`, `8`},
		{``, ``, `{"a":1}`, `{"a":1}`},
	} {
		merged, err := idempotency.Merge([]byte(c.text), []byte(c.known), []byte(c.changed))
		require.NoError(t, err)
		require.JSONEq(t, c.want, string(merged), c.text)
	}
}

// Property: whatever is stored, a program that changed nothing stores the same, and one that knows
// nothing adds to it.
func FuzzMergeState(f *testing.F) {
	for _, text := range []string{`{}`, `{"a": {"b": [1, {"c": null}]}, "A": 1e400, "ſ": 2, "s": 3}`, `null`, `[1]`, `{"a": "\ud800"}`} {
		f.Add(text, text)
	}
	f.Fuzz(func(t *testing.T, text, changed string) {
		if !json.Valid([]byte(text)) || !json.Valid([]byte(changed)) {
			return
		}
		merged, err := idempotency.Merge([]byte(text), []byte(changed), []byte(changed))
		require.NoError(t, err)
		require.Equal(t, text, string(merged))
		merged, err = idempotency.Merge([]byte(text), []byte(`{}`), []byte(changed))
		require.NoError(t, err)
		require.True(t, json.Valid(merged), string(merged))
		var was, is, result map[string]any
		if json.Unmarshal([]byte(text), &was) != nil || json.Unmarshal([]byte(changed), &is) != nil || was == nil || is == nil {
			return
		}
		require.NoError(t, json.Unmarshal(merged, &result))
		for name := range is {
			require.Contains(t, result, name)
		}
	})
}

package pgerr_test

import (
	"fmt"
	"io"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/assert"

	"github.com/effectonce/effectonce/internal/pgerr"
)

// Property: an error has the state of the server's error in it, wrapped or not; any other error has
// none and is in no class.
func TestStates(t *testing.T) {
	t.Parallel()
	of := func(state string) error { return fmt.Errorf("work: %w", &pgconn.PgError{Code: state}) }
	assert.Equal(t, "40001", pgerr.State(of("40001")))
	for _, other := range []error{nil, io.EOF, of("")} {
		assert.Empty(t, pgerr.State(other))
		assert.False(t, pgerr.Is(other, "", pgerr.UniqueViolation))
		assert.False(t, pgerr.InClass(other, "", "23"))
	}
	assert.True(t, pgerr.Is(of("23505"), pgerr.Deadlock, pgerr.UniqueViolation))
	assert.True(t, pgerr.InClass(of("23505"), "08", "23"))
	assert.False(t, pgerr.InClass(of("23505"), "22"))
	for _, state := range []string{"08006", "08P01", "53300", "53100", "57P01", "57P03", "58030"} {
		assert.True(t, pgerr.Unavailable(of(state)), state)
	}
	for _, state := range []string{"57014", "28P01", "3D000", "42501", "40001", ""} {
		assert.False(t, pgerr.Unavailable(of(state)), state)
	}
	for text, want := range map[string]bool{
		"server login has been failing, cached error: connect failed (server_login_retry)": true, "no more connections allowed (max_client_conn)": true,
		"query_wait_timeout": true, "SASL authentication failed": false, "unsupported startup parameter: search_path": false, "no such user": false,
	} {
		assert.Equal(t, want, pgerr.Unavailable(&pgconn.PgError{Code: "08P01", Message: text}), text)
	}
	for state, want := range map[string][2]bool{"40001": {false, true}, "40P01": {true, true}, "55P03": {true, true}, "55000": {}, "40002": {}} {
		assert.Equal(t, want, [2]bool{pgerr.LockConflict(of(state)), pgerr.Transient(of(state))}, state)
	}
}

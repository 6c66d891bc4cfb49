package main_test

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
)

// requests makes one key in doubt, one given up, one that is locked, one that is stuck, and two
// finished ones, one of which is over.
func requests(t *testing.T, conn *pgx.Conn) {
	t.Helper()
	execSQL(t, conn, `INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, phases, calling, request, body, status, locked_until, locked_by,
			attempts, error, created_at, finished_at, expires_at) VALUES
		('t7', 'charge', 'in-doubt', sha256('x'), 'indeterminate', '{reserve}', 'pay', 'card 4111', NULL, NULL, NULL, 'pod-1', 1, 'no answer', now() - interval '3 hours', NULL, NULL),
		('t7', 'charge', 'given-up', sha256('x'), 'abandoned', '{}', NULL, 'card 4222', NULL, NULL, NULL, 'pod-1', 20, 'refused', now() - interval '2 hours', NULL, NULL),
		('t7', 'charge', 'locked', sha256('x'), 'running', '{}', NULL, NULL, NULL, NULL, now() + interval '1 hour', 'pod-2', 1, NULL, now() - interval '1 hour', NULL, NULL),
		('t7', 'charge', 'same', sha256('x'), 'running', '{}', NULL, NULL, NULL, NULL, NULL, NULL, 1, NULL, now() - interval '4 hours', NULL, NULL),
		('t8', 'charge', 'same', sha256('x'), 'finished', '{}', NULL, NULL, 'paid: 4333', 201, NULL, NULL, 1, NULL, now(), now(), now() + interval '1 day'),
		('t8', 'charge', 'over', sha256('x'), 'finished', '{}', NULL, NULL, 'paid', 201, NULL, NULL, 1, NULL, now(), now(), now() - interval '2 hours')`)
}

// Names that are no text are refused before anything is done.
func TestKeysRefuseWrongUse(t *testing.T) {
	t.Parallel()
	for _, line := range []string{"show \xe9", "unlock \xe9 --why w", "show k --scope \xe9", "list --operation \xe9"} {
		r := runOn(t, "postgres://u@127.0.0.1:1/d", append([]string{"keys"}, strings.Fields(line)...)...)
		assert.Equal(t, 2, r.code, line)
		assert.Contains(t, r.stderr, ": want 1 to 255 characters of UTF-8", line)
	}
	r := runOn(t, "postgres://u@127.0.0.1:1/d", "keys", "finish", "k", "--status", "201", "--header", "X-A:\xe9", "--why", "w")
	assert.Equal(t, 2, r.code)
	assert.Contains(t, r.stderr, "Name: value")
}

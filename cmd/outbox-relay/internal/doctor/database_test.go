package doctor_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/doctor"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// What would cost exactly-once after a crash is a failure, what costs only the last moment a
// warning.
func TestDurabilityIsChecked(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.EmptyDatabase(t))
	exec(t, conn, "SET synchronous_commit = off")
	findings := doctor.Durability(t.Context(), conn)
	last := findings[len(findings)-1]
	assert.Equal(t, doctor.Warn, last.Severity)
	assert.Contains(t, last.Message, "synchronous_commit is off")

	// The server that tests share does not sync, unless it is an external one.
	var fsync string
	require.NoError(t, conn.QueryRow(t.Context(), "SHOW fsync").Scan(&fsync))
	assert.Equal(t, fsync == "on", doctor.Well(findings))
	if fsync == "off" {
		assert.Contains(t, findings[0].Message, "fsync is off")
	}
}

// A database that refuses writes is found before the relay is started on it (row O25).
func TestReadOnlyDatabaseIsFound(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	exec(t, conn, "SET default_transaction_read_only = on")
	findings := doctor.Server(t.Context(), conn)
	require.Len(t, findings, 2)
	assert.Equal(t, doctor.OK, findings[0].Severity)
	assert.Equal(t, doctor.Fail, findings[1].Severity)
	assert.Contains(t, findings[1].Message, "default_transaction_read_only")
}

// The version of the tables is compared with that of the program, both ways.
func TestSchemaVersionIsChecked(t *testing.T) {
	t.Parallel()
	none := connect(t, pgtest.EmptyDatabase(t))
	assert.Contains(t, only(t, doctor.Schema(t.Context(), none, "effectonce")).Remedy, "migrate up")
	newer := connect(t, pgtest.Database(t))
	exec(t, newer, "UPDATE effectonce.schema_version SET version = version + 1")
	f := only(t, doctor.Schema(t.Context(), newer, "effectonce"))
	assert.Equal(t, doctor.Warn, f.Severity)
	assert.Contains(t, f.Message, "and works with it")
	assert.Contains(t, f.Remedy, "update this program when you can")
	exec(t, newer, "UPDATE effectonce.schema_compatibility SET oldest = 1000")
	f = only(t, doctor.Schema(t.Context(), newer, "effectonce"))
	assert.Equal(t, doctor.Fail, f.Severity)
	assert.Contains(t, f.Remedy, "update this program")
}

// A sequence cache would break the order of a key without any error; the remedy fixes it.
func TestSequenceCacheIsFound(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	exec(t, conn, "ALTER SEQUENCE effectonce.outbox_seq_seq CACHE 10")
	f := only(t, doctor.Sequence(t.Context(), conn, "effectonce"))
	require.Equal(t, doctor.Fail, f.Severity)
	exec(t, conn, f.Remedy)
	require.Equal(t, doctor.OK, only(t, doctor.Sequence(t.Context(), conn, "effectonce")).Severity)
}

// Checks that run out of time are one finding, whose remedy is more time.
func TestLateChecks(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.EmptyDatabase(t))
	over, cancel := context.WithDeadline(t.Context(), time.Now())
	defer cancel()
	found := doctor.Server(t.Context(), conn)
	inTime := len(found)
	found = append(found, doctor.Durability(over, conn)...)
	found = append(found, doctor.Pipeline(over, conn, "effectonce", 0)...)
	found = append(found, doctor.Pooler(over, func(context.Context) (*pgx.Conn, error) { return nil, errors.New("no answer") })...)
	late := doctor.Late(found, 10*time.Millisecond)
	require.Len(t, late, inTime+1)
	assert.Equal(t, doctor.Fail, late[inTime].Severity)
	assert.Equal(t, "the database did not answer all checks within 10ms (--timeout); not checked: durability, status, pooler, and what depends on them", late[inTime].Message)
	assert.Contains(t, late[inTime].Remedy, "raise --timeout")
	assert.Equal(t, late[:inTime], doctor.Late(late[:inTime], time.Second))
	client := kafkatest.Client(t)
	assert.Contains(t, only(t, doctor.Brokers(over, kadm.NewClient(client), "seed")).Remedy, "raise --timeout")
}

// A check that cannot look is a failure, not silence.
func TestCheckThatCannotLookFails(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.EmptyDatabase(t))
	f := only(t, doctor.Sequence(t.Context(), conn, "effectonce"))
	assert.Equal(t, doctor.Fail, f.Severity)
	assert.Contains(t, f.Message, "the check itself failed")
}

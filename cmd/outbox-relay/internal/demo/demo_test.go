//go:build unix

package demo_test

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/demo"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// short is a run that has a freeze and a kill of everything and still fits into a test.
func short(t *testing.T) demo.Options {
	t.Helper()
	return demo.Options{
		Command:     []string{os.Args[0], childArgument},
		DatabaseURL: pgtest.EmptyDatabase(t),
		Brokers:     kafkatest.Brokers(t),
		Orders:      900, Duration: 7 * time.Second, Session: 2 * time.Second, Seed: 7, Progress: func(demo.Progress) {},
	}
}

// An interrupted run ends at once and removes what it made.
func TestRunIsInterrupted(t *testing.T) {
	longtest.Only(t, "the demo's processes")
	t.Parallel()
	options := short(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	options.Progress = func(p demo.Progress) {
		if p.Effects > 0 && p.Freezes > 0 {
			cancel()
		}
	}
	_, err := demo.Run(ctx, options)
	require.ErrorIs(t, err, context.Canceled)
	assertNothingLeft(t, options)
}

func assertNothingLeft(t *testing.T, options demo.Options) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), options.DatabaseURL)
	require.NoError(t, err)
	defer func() { assert.NoError(t, conn.Close(t.Context())) }()
	var schemas int
	require.NoError(t, conn.QueryRow(t.Context(), `SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'effectonce%'`).Scan(&schemas))
	assert.Zero(t, schemas)
}

// A child that cannot be kept running ends the run with the end of its log, not with a wait.
func TestRunReportsAChildThatFails(t *testing.T) {
	t.Parallel()
	options := short(t)
	options.Brokers = kafkatest.Own(t).Brokers
	options.Command = []string{"sh", "-c", "echo the reason is this; exit 5"}
	_, err := demo.Run(t.Context(), options)
	require.ErrorContains(t, err, "the reason is this")
	require.ErrorContains(t, err, "exit status 5")
	_, logs, found := strings.Cut(err.Error(), "the processes' logs are in ")
	require.True(t, found, err)
	t.Cleanup(func() { assert.NoError(t, os.RemoveAll(logs)) })
	assert.FileExists(t, filepath.Join(logs, "relay-1.log"))
	assertNothingLeft(t, options)
	kafkatest.Gone(t, options.Brokers)
}

// More orders than the shop can place are refused before anything is started.
func TestRunRefusesTooManyOrders(t *testing.T) {
	t.Parallel()
	_, err := demo.Run(t.Context(), demo.Options{Orders: 100_000, Duration: time.Minute})
	require.ErrorContains(t, err, "want at most 500")
}

// A user who starts a child by hand gets an explanation.
func TestRunProcessWithoutAJob(t *testing.T) {
	t.Parallel()
	for _, input := range []string{"", "\n", "{\"Role\":\"pirate\"}\n"} {
		err := demo.RunProcess(t.Context(), strings.NewReader(input), io.Discard, func() {})
		require.ErrorContains(t, err, "started by the demo, not by people")
	}
}

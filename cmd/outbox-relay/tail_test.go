package main_test

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	main "github.com/effectonce/effectonce/cmd/outbox-relay"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
)

// tail shows rows as they commit, until it is interrupted or has shown enough; payloads only where
// asked. Row S3 of guarantees.md.
func TestTailFollows(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn := connect(t, address)
	execSQL(t, conn, "INSERT INTO effectonce.outbox (topic, key, payload) VALUES ('t', E'k\\\\033', 'CANARY'), ('t', 'k', NULL)")
	r := runOn(t, address, "tail", "--from-beginning", "--limit", "2")
	assert.Zero(t, r.code, r.stderr)
	assert.Regexp(t, `(?m)^\S+Z  1  t  base64:axs=  \S{36}  6 bytes\n\S+Z  2  t  k  \S{36}  tombstone\n$`, r.stdout)
	assertNoCanary(t, r, "tail")
	r = runOn(t, address, "tail", "--from-beginning", "--limit", "1", "--payload", "--json", "--topic", "t")
	assert.Equal(t, "CANARY", r.object(t)["payload"])

	ctx, interrupt := context.WithCancel(t.Context())
	out := newOutput()
	done := make(chan int, 1)
	go func() {
		done <- main.Execute(ctx, []string{"tail", "--json", "--every", "10ms", "--from-beginning"}, map[string]string{"DATABASE_URL": address}, out, newOutput())
	}()
	out.await(t, `"seq":2`)
	execSQL(t, conn, "INSERT INTO effectonce.outbox (topic) VALUES ('later')")
	out.await(t, `"topic":"later"`)
	interrupt()
	assert.Zero(t, testwait.Chan(t, "the command's end", done), "an interrupt is how it ends")
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	require.Len(t, lines, 3)
	for _, line := range lines {
		assert.True(t, json.Valid([]byte(line)), line)
	}
}

// status --watch shows it again until it is interrupted.
func TestStatusWatches(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	ctx, interrupt := context.WithCancel(t.Context())
	out := newOutput()
	done := make(chan int, 1)
	go func() {
		done <- main.Execute(ctx, []string{"status", "--json", "--interval", "0s", "--watch", "100ms"}, map[string]string{"DATABASE_URL": address}, out, newOutput())
	}()
	out.await(t, `"waiting":0`)
	execSQL(t, connect(t, address), insertTwo)
	out.await(t, `"waiting":2`)
	interrupt()
	assert.Zero(t, testwait.Chan(t, "the command's end", done))
}

package main

import (
	"bytes"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// Property: the quick start needs only Go, and a message that is delivered twice has one effect.
func TestQuickstart(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	require.NoError(t, run(t.Context(), &out, os.Getenv("DATABASE_URL")))
	require.Contains(t, out.String(), "3 orders, 4 messages (one of them twice), 3 invoices")
}

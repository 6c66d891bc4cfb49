package main

import (
	"bytes"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// Property: a request and its retry get the same 202, and its status becomes the result of the work.
func TestAcceptedRequestIsDone(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	require.NoError(t, run(t.Context(), &out, os.Getenv("DATABASE_URL")), out.String())
	require.Regexp(t, `^POST 202  \nPOST 202 true \n(GET 202  \n|GET 200  done\n)GET 200  done\n$`, out.String())
}

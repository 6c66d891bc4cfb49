package main_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/effectonce/effectonce/internal/pgtest"
)

// Property: a role that may read the tables, and nothing else, gets what the commands show; none
// asks for a right to change anything.
func TestReadersSeeThePipeline(t *testing.T) {
	t.Parallel()
	address, topic := published(t)
	prefix := pgtest.RolePrefix(t, address)
	conn := connect(t, address)
	execSQL(t, conn, fmt.Sprintf(`CREATE ROLE %[1]s_reader; GRANT USAGE ON SCHEMA effectonce TO %[1]s_reader; GRANT SELECT ON ALL TABLES IN SCHEMA effectonce TO %[1]s_reader`, prefix))
	reader := pgtest.Login(t, address, prefix, "reader")
	for _, line := range [][]string{
		{"status", "--interval", "0s"},
		{"verify"},
		{"positions"},
		{"explain", topic + "/0/0"},
		{"dead", "list"},
		{"parked", "list"},
		{"keys", "list"},
		{"actions", "list"},
		{"relays", "list"},
		{"topics", "list"},
		{"publishers", "list"},
		{"consumer", "id-rule"},
		{"tail", "--from-beginning", "--to-end"},
		{"migrate", "status"},
	} {
		r := runKafka(t, reader, line...)
		assert.Zero(t, r.code, "%q: %s%s", line, r.stdout, r.stderr)
		for _, asks := range []string{"TRUNCATE", "GRANT", "grant ", "permission denied"} {
			assert.NotContains(t, r.stdout+r.stderr, asks, line)
		}
	}
	r := runKafka(t, reader, "doctor")
	t.Log(r.stdout, r.stderr)
}

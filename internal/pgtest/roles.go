package pgtest

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"net/url"
	"testing"

	"github.com/effectonce/effectonce/internal/testwait"
)

// RolePrefix returns a prefix for role names that no other test uses. Roles belong to the whole
// server. When the test ends, roles whose name begins with the prefix and an underscore are
// dropped, with what they own and their rights in the database at address.
func RolePrefix(tb testing.TB, address string) string {
	tb.Helper()
	random := make([]byte, 8)
	_, _ = rand.Read(random) // never fails
	prefix := "test_" + hex.EncodeToString(random)
	testwait.AtEnd(tb, "drop the test's roles", func(ctx context.Context) error { return execute(ctx, address, dropRolesSQL(prefix)) })
	return prefix
}

func dropRolesSQL(prefix string) string {
	return `SET search_path = pg_catalog, pg_temp; -- of tests that plant hostile functions
DO $$
DECLARE
  role text;
BEGIN
  FOR role IN SELECT rolname FROM pg_roles WHERE starts_with(rolname, '` + prefix + `_') LOOP
    EXECUTE format('DROP OWNED BY %I CASCADE', role);
    EXECUTE format('DROP ROLE %I', role);
  END LOOP;
END
$$`
}

// Login creates a role PREFIX_login_PART that may log in and is a member of the role PREFIX_PART,
// and of no other. It returns a URL that logs in as that role.
func Login(tb testing.TB, address, prefix, part string) string {
	tb.Helper()
	name := prefix + "_login_" + part
	sql := "CREATE ROLE " + name + " LOGIN PASSWORD 'of-a-test'; GRANT " + prefix + "_" + part + " TO " + name
	if err := execute(tb.Context(), address, sql); err != nil {
		tb.Fatalf("create a role that may log in: %v", err)
	}
	u, err := url.Parse(address)
	if err != nil {
		tb.Fatal(err)
	}
	u.User = url.UserPassword(name, "of-a-test")
	return u.String()
}

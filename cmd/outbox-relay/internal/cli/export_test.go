package cli

import (
	"context"
	"fmt"
	"net"
)

// DialThisMachine is how brokers are dialled without TLS and without --insecure.
func DialThisMachine(ctx context.Context, base *net.Dialer, broker string) (net.Conn, error) {
	return dialThisMachine(base)(ctx, "tcp", broker)
}

// Away reports whether a start waits for the database.
var Away = away

// FormatSettings formats settings that hold a database URL, in every usual way.
func FormatSettings(databaseURL string) string {
	s := Settings{}
	_ = s.parseDatabaseURL(databaseURL) // the address says whether it was parsed
	return fmt.Sprintf("%v %+v %#v %v %+v %s", s, s, s, s.pool, &s, s.Target())
}

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
	s := secret{func() string { return databaseURL }}
	return fmt.Sprintf("%v %+v %#v %s %q", s, Settings{databaseURL: s}, s, s, s) + s.LogValue().String()
}

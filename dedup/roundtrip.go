package dedup

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/effectonce/effectonce/internal/pgerr"
)

// Step is a statement that shares the round trip of BeginFresh.
type Step struct {
	SQL string
	// Args are its parameters, in PostgreSQL's text form.
	Args []string
	// Into are the destinations for the columns of its only row, nil for one that is not read. If
	// there is no row, they do not change.
	Into []any

	rows []byte // of a COPY
}

const binaryFormat = 1

// roundTrip runs steps, one of which may be a COPY with its rows, in one round trip, and returns
// the number of steps that succeeded. A pgx.Batch cannot do that: it does not support COPY.
// roundTrip sends what a batch would send, and the rows after the COPY. PostgreSQL ignores the rows
// if an earlier step fails (see "COPY Operations" and "Extended Query" of its protocol), so the
// client need not wait for the server before it sends them. After an error the connection is in
// sync with the server, or closed.
func roundTrip(ctx context.Context, conn *pgx.Conn, steps []Step) (done int, err error) {
	// In the other modes, statement names would not survive a pooler between client and server.
	// Then each step is parsed again.
	named := conn.Config().DefaultQueryExecMode == pgx.QueryExecModeCacheStatement
	frontend := conn.PgConn().Frontend()
	names := make([]string, len(steps))
	if named {
		for i, step := range steps {
			prepared, err := conn.Prepare(ctx, step.SQL, step.SQL)
			if err != nil {
				return i, err
			}
			names[i] = prepared.Name
		}
	}
	for i, step := range steps {
		if !named {
			frontend.SendParse(&pgproto3.Parse{Query: step.SQL})
		}
		step.send(frontend, names[i])
	}
	frontend.SendSync(&pgproto3.Sync{})
	done, err = exchange(ctx, conn, steps)
	if named && pgerr.Is(err, pgerr.UnknownStatement) { // DISCARD ALL removed it: the next attempt prepares it again
		for _, step := range steps {
			err = errors.Join(err, conn.Deallocate(ctx, step.SQL))
		}
	}
	return done, err
}

func (s *Step) send(frontend *pgproto3.Frontend, name string) {
	args := make([][]byte, len(s.Args))
	for i, arg := range s.Args {
		args[i] = []byte(arg)
	}
	frontend.SendBind(&pgproto3.Bind{PreparedStatement: name, Parameters: args, ResultFormatCodes: []int16{binaryFormat}})
	if s.Into != nil {
		frontend.SendDescribe(&pgproto3.Describe{ObjectType: 'P'})
	}
	frontend.SendExecute(&pgproto3.Execute{})
	if s.rows != nil {
		frontend.Send(&pgproto3.CopyData{Data: s.rows})
		frontend.Send(&pgproto3.CopyDone{})
	}
}

// exchange sends the buffered messages and reads until the server is ready again.
func exchange(ctx context.Context, conn *pgx.Conn, steps []Step) (done int, err error) {
	if err := flush(ctx, conn); err != nil {
		return 0, broken(ctx, conn, err)
	}
	var failed error
	var types []uint32
	for {
		msg, err := conn.PgConn().ReceiveMessage(ctx)
		if err != nil {
			return done, broken(ctx, conn, err)
		}
		switch msg := msg.(type) {
		case *pgproto3.RowDescription:
			types = types[:0]
			for _, field := range msg.Fields {
				types = append(types, field.DataTypeOID)
			}
		case *pgproto3.DataRow:
			if failed == nil && done < len(steps) {
				failed = steps[done].read(conn, types, msg.Values)
			}
		case *pgproto3.CommandComplete:
			done++
		case *pgproto3.ErrorResponse:
			failed = errors.Join(failed, pgconn.ErrorResponseToPgError(msg))
		case *pgproto3.ReadyForQuery:
			return done, failed
		}
	}
}

// flush also bounds the write: a connection that hangs accepts only what fits into its buffers.
func flush(ctx context.Context, conn *pgx.Conn) error {
	if limit, ok := ctx.Deadline(); ok {
		if err := conn.PgConn().Conn().SetWriteDeadline(limit); err != nil {
			return err
		}
	}
	return errors.Join(conn.PgConn().Frontend().Flush(), conn.PgConn().Conn().SetWriteDeadline(time.Time{}))
}

// broken closes a connection that is out of sync with the server.
func broken(ctx context.Context, conn *pgx.Conn, err error) error {
	_ = conn.PgConn().Conn().Close() // the connection can no longer carry a Terminate message
	_ = conn.Close(ctx)
	return err
}

func (s *Step) read(conn *pgx.Conn, types []uint32, values [][]byte) error {
	if s.Into == nil {
		return nil
	}
	if len(values) != len(s.Into) || len(types) != len(values) {
		return fmt.Errorf("statement returned %d columns: want %d", len(values), len(s.Into))
	}
	for i, into := range s.Into {
		if err := conn.TypeMap().Scan(types[i], binaryFormat, values[i], into); err != nil {
			return err
		}
	}
	return nil
}

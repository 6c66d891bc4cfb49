package idempotency

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// ErrExpired is for work, and phases of a flow, that find effects of an earlier execution of the
// request: the client retried after Config.Window, when the key was forgotten. Their writes are
// rolled back, the response that Config.Failed makes for ErrExpired is stored as the outcome
// (httpkey: 410), and Once and Flow.Do return it without an error.
//
// The work need not return it if an INSERT fails because such a row exists. A unique violation
// (23505) is treated as ErrExpired if the row exists after the rollback, and the violating ID came
// from Key.ChildID of a watched key (Key.Watch; keys of httpkey are watched), or from Step.ChildID
// in the Write of its phase. PostgreSQL must show the ID in the error's detail, and the row to the
// program's role; otherwise the error is unchanged. In a flow a foreign system may have been called
// again before the violation: then the key is indeterminate. To avoid that, insert the row in a
// phase before all calls.
var ErrExpired = errors.New("the request was executed before, and its idempotency key is forgotten")

// children records the child IDs that were derived from a key.
type children struct {
	mu  sync.Mutex
	ids map[string]bool
}

const childrenMax = 1000 // IDs beyond it are not recorded: unique violations of their rows stay unchanged

func (c *children) add(id uuid.UUID) {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.ids) < childrenMax {
		c.ids[id.String()] = true
	}
}

func (c *children) has(id string) bool {
	if c == nil {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ids[id]
}

// Watch returns a copy of the key that records the child IDs derived from it, at most 1000, for
// Once: see ErrExpired. Give the same copy to Once and to its work. A watched key never equals
// another one by ==.
func (k Key) Watch() Key {
	k.children = &children{ids: map[string]bool{}}
	return k
}

// expired turns a failure into an outcome if it was caused by effects of an earlier execution.
// after ends the failed transaction, and returns a connection for the query; nil means that no
// query is made.
func (o *Operation) expired(ctx context.Context, key Key, cause error, after func() rows) error {
	var final *FinalError
	if cause == nil || errors.As(cause, &final) || errors.Is(cause, ErrIndeterminate) {
		return cause
	}
	if !errors.Is(cause, ErrExpired) {
		sql, args := earlier(key, cause)
		if sql == "" || after == nil {
			return cause
		}
		asked, there := after(), false
		if asked == nil || asked.QueryRow(ctx, sql, args...).Scan(&there) != nil || !there {
			return cause
		}
		cause = fmt.Errorf("%w: %w", ErrExpired, cause)
	}
	o.cfg.Logger.WarnContext(ctx, "a request was retried after its key was forgotten; it is not executed again", "key", key, "error", cause)
	return Final(o.cfg.Failed(cause), cause)
}

type rows interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// back rolls back what the work wrote, but keeps its claim, for expired.
func (t *transaction) back(ctx context.Context) rows {
	if !t.usable() {
		return nil
	}
	if _, err := t.conn.Exec(ctx, undoSQL); err != nil {
		return nil
	}
	return t.conn
}

// uniqueDetail matches columns and values in the detail of a unique violation, in any language of
// the server.
var uniqueDetail = regexp.MustCompile(`\(([^()]+)\)=\((.+)\)`)

// column matches a name as the server writes it, which needs no further quoting.
var column = regexp.MustCompile(`^([a-z_][a-z0-9_$]*|"([^"]|"")+")$`)

// earlier returns the query for the row that caused a unique violation, or none if the violation
// was not for a child ID of the key. It names all columns of the index, so that the index is used.
func earlier(key Key, cause error) (sql string, args []any) {
	var refusal *pgconn.PgError
	if !errors.As(cause, &refusal) || refusal.Code != "23505" || refusal.TableName == "" {
		return "", nil
	}
	match := uniqueDetail.FindStringSubmatch(refusal.Detail)
	if match == nil {
		return "", nil
	}
	columns, values := strings.Split(match[1], ", "), strings.Split(match[2], ", ")
	if len(columns) != len(values) {
		return "", nil
	}
	var where []string
	mine := false
	for i, name := range columns {
		if !column.MatchString(name) {
			return "", nil
		}
		mine = mine || key.children.has(values[i])
		where = append(where, fmt.Sprintf("%s = $%d", name, i+1))
		args = append(args, values[i])
	}
	if !mine {
		return "", nil
	}
	table := pgx.Identifier{refusal.SchemaName, refusal.TableName}.Sanitize()
	return "-- idempotency.expired\nSELECT EXISTS (SELECT FROM " + table + " WHERE " + strings.Join(where, " AND ") + ")", args
}

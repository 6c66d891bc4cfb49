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

// ErrExpired is for work, and for phases of a flow, that find what an earlier execution of the request left: its client comes
// after Config.Window, when the key is forgotten. What they wrote is rolled back, what Config.Failed makes of ErrExpired is stored as the
// outcome (httpkey: 410), and Once and Flow.Do return it without an error.
//
// Where an INSERT is refused because of such a row, it need not be returned: a unique violation (23505) of an ID that Key.ChildID
// made of this key, in work under a key that is watched (Key.Watch; those of httpkey are), or of Step.ChildID in what its phase
// writes, is taken for it if the row is there after the rollback. PostgreSQL must show the ID in the error's detail, and the
// row to the program's role; where it does not, the error stays what it is. In a flow a foreign system may have been asked again before
// that shows: then the key is indeterminate. Have a phase in front of all calls insert the row.
var ErrExpired = errors.New("the request was executed before, and its idempotency key is forgotten")

// children are child IDs that were derived of a key.
type children struct {
	mu  sync.Mutex
	ids map[string]bool
}

const childrenMax = 1000 // those beyond are not known later, and refusals of their rows stay what they are

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

// Watch returns the key, of which Once knows from then on which child IDs, of at most 1000, were derived: see ErrExpired. Give the same
// one to Once and to its work. A watched key equals no other by ==.
func (k Key) Watch() Key {
	k.children = &children{ids: map[string]bool{}}
	return k
}

// expired makes an outcome of a failure that what an earlier execution left is the cause of. after ends what the failure left of
// the transaction, and returns what the database can be asked through; nil: it is not asked.
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
	o.cfg.Logger.WarnContext(ctx, "a request came again after its key was forgotten: it is not executed again", "key", key, "error", cause)
	return Final(o.cfg.Failed(cause), cause)
}

type rows interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// back undoes what the work wrote, under its claim, for expired.
func (t *transaction) back(ctx context.Context) rows {
	if !t.usable() {
		return nil
	}
	if _, err := t.conn.Exec(ctx, undoSQL); err != nil {
		return nil
	}
	return t.conn
}

// refused are columns and values in the detail of a unique violation, in any language of the server.
var refused = regexp.MustCompile(`\(([^()]+)\)=\((.+)\)`)

// column is a name as the server writes it, which leaves nothing to quote.
var column = regexp.MustCompile(`^([a-z_][a-z0-9_$]*|"([^"]|"")+")$`)

// earlier is the question whether the row is there that another one was refused for; none if that was not for a child ID of
// the key. It names all columns of the index, so that it is used.
func earlier(key Key, cause error) (sql string, args []any) {
	var refusal *pgconn.PgError
	if !errors.As(cause, &refusal) || refusal.Code != "23505" || refusal.TableName == "" {
		return "", nil
	}
	match := refused.FindStringSubmatch(refusal.Detail)
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

package cli

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/internal/pgerr"
	"github.com/effectonce/effectonce/migrations"
)

// connectMax is how long a connection may take.
const connectMax = 10 * time.Second

// connectPauseMax is the longest pause between two attempts to connect.
const connectPauseMax = 10 * time.Second

// errBadURL never says more: any part of a malformed URL may be a piece of the password, so neither
// the URL nor the parser's error is repeated.
var errBadURL = errors.New("the database URL cannot be parsed: want postgres://user:password@host:5432/dbname; " +
	"in user and password write % as %25, @ as %40, # as %23, / as %2F, : as %3A, ? as %3F, \\ as %5C and a space as %20")

// errBadMode does not repeat the mode, which may also be a piece of the password.
var errBadMode = errors.New("the database URL's sslmode is unknown: want disable, allow, prefer, require, verify-ca or verify-full (PGSSLMODE where the URL has none)")

// errBadFile does not name the file: a path may also be a piece of the password.
var errBadFile = errors.New("a file of the database URL's TLS settings cannot be used: want sslrootcert, sslcert and sslkey (PGSSLROOTCERT, PGSSLCERT " +
	"and PGSSLKEY where the URL has none; also servicefile) to name files that exist, that the user this runs as can read, and that are in PEM form")

// urlError replaces the parser's error by one that quotes nothing.
func urlError(err error) error {
	var file *fs.PathError
	if errors.As(err, &file) {
		return errBadFile
	}
	for _, text := range []string{"unable to add CA", "failed to decode sslkey", "unable to load cert"} {
		if cause := errors.Unwrap(err); cause != nil && strings.HasPrefix(cause.Error(), text) {
			return errBadFile
		}
	}
	if cause := errors.Unwrap(err); cause != nil && cause.Error() == "sslmode is invalid" {
		return errBadMode
	}
	return errBadURL
}

// settingName matches names of connection parameters. Any other name is a piece of something else,
// perhaps of a password with a space in it.
var settingName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_.]*$`)

// hostName is a name or an IPv4 or IPv6 address.
var hostName = regexp.MustCompile(`^[A-Za-z0-9._:%-]+$`)

// hosts lists the attempts of a connection, in order.
func hosts(c *pgx.ConnConfig) []*pgconn.FallbackConfig {
	return append([]*pgconn.FallbackConfig{{Host: c.Host, Port: c.Port, TLSConfig: c.TLSConfig}}, c.Fallbacks...)
}

// parseDatabaseURL also refuses URLs that the parser misreads: part of a password with an unescaped
// / or # becomes the name of the database.
func parseDatabaseURL(text string) (*pgxpool.Config, error) {
	for _, scheme := range []string{"postgres://", "postgresql://"} {
		rest, isURL := strings.CutPrefix(text, scheme)
		if !isURL {
			continue
		}
		authority, after := rest, ""
		if i := strings.IndexAny(rest, "/?#"); i >= 0 {
			authority, after = rest[:i], rest[i:]
		}
		if strings.Count(authority, "@") > 1 || strings.ContainsAny(after, "@#") {
			return nil, errBadURL
		}
	}
	config, err := pgxpool.ParseConfig(text)
	if err != nil {
		return nil, urlError(err)
	}
	c := config.ConnConfig
	for name := range c.RuntimeParams {
		if !settingName.MatchString(name) {
			return nil, errBadURL
		}
	}
	for _, host := range hosts(c) {
		if host.TLSConfig != nil {
			host.TLSConfig.MinVersion = tls.VersionTLS12
		}
		if !hostName.MatchString(host.Host) && !strings.HasPrefix(host.Host, "/") {
			return nil, errBadURL
		}
	}
	if c.ConnectTimeout == 0 || c.ConnectTimeout > connectMax {
		c.ConnectTimeout = connectMax
	}
	if c.RuntimeParams["application_name"] == "" {
		c.RuntimeParams["application_name"] = "outbox-relay"
	}
	// This path finds no function or operator that another role planted in a schema.
	c.RuntimeParams[searchPath] = "pg_catalog, pg_temp"
	// One round trip and no named statement, so that it works behind a transaction pooler.
	if c.DefaultQueryExecMode == pgx.QueryExecModeCacheStatement {
		c.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe
	}
	return config, nil
}

// Connect opens a connection, maybe to a standby. Close it with HangUp.
func (s *Settings) Connect(ctx context.Context) (*pgx.Conn, error) {
	return s.connectWith(ctx, s.pool.ConnConfig.Copy())
}

func (s *Settings) connectWith(ctx context.Context, config *pgx.ConnConfig) (*pgx.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, connectMax)
	defer cancel()
	if err := s.usePassword(ctx, config); err != nil {
		return nil, s.connectError(err)
	}
	conn, err := pgx.ConnectConfig(ctx, config)
	if s.refusesPath(err) {
		delete(config.RuntimeParams, searchPath)
		conn, err = pgx.ConnectConfig(ctx, config)
	}
	if err != nil {
		return nil, s.connectError(err)
	}
	takeAnyTime(conn)
	return conn, nil
}

// searchPath is a startup parameter: a SET would stay on a server connection that a pooler hands to
// other clients.
const searchPath = "search_path"

// refusesPath reports whether a pooler refused the search path as a startup parameter. If so, later
// connections do not send it. Statements qualify every name that could be overloaded, so they are
// safe under any path that does not put another schema before pg_catalog.
func (s *Settings) refusesPath(err error) bool {
	var pgErr *pgconn.PgError
	refused := errors.As(err, &pgErr) && strings.Contains(pgErr.Message, "unsupported startup parameter") && s.pool.ConnConfig.RuntimeParams[searchPath] != ""
	if refused {
		delete(s.pool.ConnConfig.RuntimeParams, searchPath)
	}
	return refused
}

// HangUp closes a connection cleanly, even after ctx has ended, and waits at most one second.
func HangUp(ctx context.Context, conn *pgx.Conn) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	_ = conn.Close(ctx) // the work is done
}

// ConnectPrimary opens a pool whose connections all lead to a primary that accepts writes.
func (s *Settings) ConnectPrimary(ctx context.Context, connections int) (*pgxpool.Pool, error) {
	config := s.pool.Copy()
	config.MaxConns = int32(connections)
	config.MinConns = min(config.MinConns, config.MaxConns)
	// Checks every new connection, also after a failover. ValidateConnect rather than AfterConnect,
	// because a URL with several hosts then continues with the next one.
	config.ConnConfig.ValidateConnect = refuseReadOnly
	config.BeforeConnect = s.usePassword
	config.AfterConnect = func(_ context.Context, conn *pgx.Conn) error {
		takeAnyTime(conn)
		return nil
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, s.connectError(err)
	}
	first, cancel := context.WithTimeout(ctx, connectMax)
	defer cancel()
	err = pool.Ping(first)
	if s.refusesPath(err) {
		pool.Close()
		return s.ConnectPrimary(ctx, connections)
	}
	if err != nil {
		pool.Close()
		return nil, s.connectError(err)
	}
	return pool, nil
}

var (
	errStandby  = errors.New("it is a standby: let the database URL name the primary")
	errReadOnly = errors.New("it is read-only: the role or the database has default_transaction_read_only on; ALTER ROLE or ALTER DATABASE ... RESET default_transaction_read_only")
)

const readOnlySQL = `-- outbox-relay.read_only
SELECT pg_is_in_recovery(), pg_catalog.current_setting('transaction_read_only')::bool`

func refuseReadOnly(ctx context.Context, conn *pgconn.PgConn) error {
	results, err := conn.Exec(ctx, readOnlySQL).ReadAll()
	if err != nil {
		return err
	}
	if len(results) != 1 || len(results[0].Rows) != 1 || len(results[0].Rows[0]) != 2 {
		return errors.New("unexpected answer")
	}
	switch row := results[0].Rows[0]; {
	case string(row[0]) != "f":
		return errStandby
	case string(row[1]) != "f":
		return errReadOnly
	}
	return nil
}

// connectError replaces the driver's error, which repeats parts of the URL.
func (s *Settings) connectError(err error) error {
	return &connectionError{fmt.Sprintf("cannot connect to the database at %s: %s", s.Target(), connectReason(err)), away(err)}
}

// connectionError is a failed attempt to connect.
type connectionError struct {
	text string
	away bool // the server may be starting, or failing over: waiting helps
}

func (e *connectionError) Error() string { return e.text }

// away reports whether the same attempt may succeed later. Waiting does not help where the server
// or a file refuses the connection. Of several hosts, one that may come back is enough: the others
// may be standbys.
func away(err error) bool {
	if pgerr.State(err) != "" {
		return pgerr.Unavailable(err) || pgerr.Transient(err)
	}
	var network net.Error
	var certificate *tls.CertificateVerificationError
	var alert tls.AlertError
	if errors.As(err, &certificate) || errors.As(err, &alert) {
		return false
	}
	refused := errors.Is(err, errReadOnly) || errors.Is(err, errSecretFile) || errors.Is(err, context.Canceled)
	return !refused && (errors.As(err, &network) || errors.Is(err, syscall.ENOENT) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, context.DeadlineExceeded) || pgconn.Timeout(err))
}

// connectionsMax is enough for every shard that a relay may hold. It opens what it needs.
const connectionsMax = 100

// ConnectWaiting is ConnectPrimary for a relay, but waits up to most for a database that is
// unreachable. It opens as many connections as the relay needs, or pool_max_conns of the URL.
func (s *Settings) ConnectWaiting(ctx context.Context, most time.Duration, logger *slog.Logger) (*pgxpool.Pool, error) {
	connections := connectionsMax
	if strings.Contains(s.pool.ConnString(), "pool_max_conns") {
		connections = int(s.pool.MaxConns)
	}
	begun := time.Now()
	for wait := time.Second; ; wait = min(2*wait, connectPauseMax) {
		pool, err := s.ConnectPrimary(ctx, connections)
		var failed *connectionError
		if !errors.As(err, &failed) || !failed.away || ctx.Err() != nil {
			return pool, err
		}
		waited := time.Since(begun)
		if waited >= most {
			if most > 0 {
				err = fmt.Errorf("%w; gave up after %s (--database-wait)", err, human.Duration(waited.Round(time.Second)))
			}
			return nil, err
		}
		wait = min(wait, most-waited)
		logger.WarnContext(ctx, "the database is unreachable: retrying", "error", err, "waited", waited.Round(time.Second), "gives_up_after", most, "next_try_in", wait)
		if !pause.For(ctx, wait) {
			return nil, err
		}
	}
}

// connectReason is what the server says, or a fixed text.
func connectReason(err error) string {
	var server *pgconn.PgError
	var dns *net.DNSError
	var certificate *tls.CertificateVerificationError
	var unknownAuthority x509.UnknownAuthorityError
	switch {
	case errors.Is(err, errStandby):
		return errStandby.Error()
	case errors.Is(err, errReadOnly):
		return errReadOnly.Error()
	case errors.Is(err, errSecretFile):
		return err.Error()
	case errors.As(err, &server):
		return server.Message + " (" + server.Code + ")" // it never repeats a password
	case errors.Is(err, syscall.ECONNREFUSED):
		return "connection refused: check host and port, and that PostgreSQL runs"
	case errors.Is(err, syscall.ENOENT):
		return "the socket does not exist: check the host, and that PostgreSQL runs"
	case errors.As(err, &dns):
		return "the host name is not known: check the host"
	case errors.As(err, &certificate), errors.As(err, &unknownAuthority):
		return "its TLS certificate is not trusted, or is of another host: set sslrootcert to the authority that signed it, and the host to a name that it has"
	case errors.Is(err, context.DeadlineExceeded), pgconn.Timeout(err): // each attempt has its error: the last one timed out
		return fmt.Sprintf("no answer in time (at most %v, less with --timeout or connect_timeout): check host and port, and the network", connectMax)
	case strings.Contains(err.Error(), "server refused TLS"):
		return "it does not offer TLS: turn ssl on there; sslmode=disable with --insecure if you trust the network"
	case errors.Is(err, context.Canceled):
		return "interrupted"
	}
	return "the connection failed: check host, port and TLS, and see the server's log"
}

// Target is the destination of a connection, as host:port/dbname, without user and password.
func (s *Settings) Target() string {
	c := s.pool.ConnConfig
	var addresses []string
	for _, h := range hosts(c) {
		if a := net.JoinHostPort(h.Host, strconv.Itoa(int(h.Port))); !slices.Contains(addresses, a) {
			addresses = append(addresses, a)
		}
	}
	name := c.Database
	switch {
	case name == "":
		name = "(the user's database)"
	case terminal.Plain(name) != name:
		name = "(a name that is not shown)"
	}
	return strings.Join(addresses, ",") + "/" + name
}

const (
	// ReadMax is the time limit of Read.
	ReadMax = 30 * time.Second
	// ChangeMax is the time limit of OnSchema.
	ChangeMax = 30 * time.Second
)

// Read runs work with a connection for reading, after checking the version of the tables.
func (s *Settings) Read(ctx context.Context, work func(context.Context, *pgx.Conn) error) error {
	ctx, cancel := context.WithTimeout(ctx, ReadMax)
	defer cancel()
	return s.WithTables(ctx, false, work)
}

// WithTables runs work with a connection, after checking the version of the tables. A command that
// writes needs a primary.
func (s *Settings) WithTables(ctx context.Context, writes bool, work func(context.Context, *pgx.Conn) error) error {
	config := s.pool.ConnConfig.Copy()
	if writes {
		config.ValidateConnect = refuseReadOnly
	}
	conn, err := s.connectWith(ctx, config)
	if err != nil {
		return err
	}
	defer HangUp(ctx, conn)
	if err := migrations.Check(ctx, conn, migrations.Options{Schema: s.Schema}); err != nil {
		return err
	}
	return work(ctx, conn)
}

// OnSchema runs f with a pool of the primary, after checking the version of the tables. It takes at
// most ChangeMax.
func (s *Settings) OnSchema(ctx context.Context, f func(ctx context.Context, pool *pgxpool.Pool) error) error {
	return s.OnSchemaFor(ctx, ChangeMax, f)
}

// OnSchemaFor is OnSchema with another time limit.
func (s *Settings) OnSchemaFor(ctx context.Context, limit time.Duration, f func(ctx context.Context, pool *pgxpool.Pool) error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	pool, err := s.ConnectPrimary(ctx, 1)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := migrations.Check(ctx, pool, migrations.Options{Schema: s.Schema}); err != nil {
		return err
	}
	return f(ctx, pool)
}

// takeAnyTime makes a connection read times that time.Time or its text forms cannot represent,
// infinity among them, as the first day of year 1 or the last day of year 9999. Records and rows of
// others may hold such times.
func takeAnyTime(conn *pgx.Conn) {
	conn.TypeMap().RegisterType(&pgtype.Type{Name: "timestamptz", OID: pgtype.TimestamptzOID, Codec: anyTime{&pgtype.TimestamptzCodec{}}})
}

type anyTime struct{ *pgtype.TimestamptzCodec }

func (c anyTime) PlanScan(types *pgtype.Map, oid uint32, format int16, target any) pgtype.ScanPlan {
	if _, ok := target.(pgtype.TimestamptzScanner); !ok {
		return nil
	}
	return anyTimeScan{c.TimestamptzCodec.PlanScan(types, oid, format, new(pgtype.Timestamptz))}
}

type anyTimeScan struct{ plan pgtype.ScanPlan }

func (s anyTimeScan) Scan(src []byte, target any) error {
	var read pgtype.Timestamptz
	if err := s.plan.Scan(src, &read); err != nil {
		return err
	}
	first, last := time.Date(1, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(9999, 12, 31, 0, 0, 0, 0, time.UTC)
	switch {
	case !read.Valid:
	case read.InfinityModifier == pgtype.Infinity, read.InfinityModifier == pgtype.Finite && read.Time.After(last):
		read = pgtype.Timestamptz{Time: last, Valid: true}
	case read.InfinityModifier == pgtype.NegativeInfinity, read.Time.Before(first):
		read = pgtype.Timestamptz{Time: first, Valid: true}
	}
	return target.(pgtype.TimestamptzScanner).ScanTimestamptz(read)
}

package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// connectMax is how long a connection may take.
const connectMax = 10 * time.Second

// errBadURL never says more: in a malformed URL any part may be a piece of the password, so neither it
// nor what the parser says about it is repeated.
var errBadURL = errors.New("the database URL cannot be parsed: want postgres://user:password@host:5432/dbname; " +
	"in user and password write % as %25, @ as %40, # as %23, / as %2F, : as %3A, ? as %3F, \\ as %5C and a space as %20")

// errBadFile does not name the file either: a path may be a piece of the password as well.
var errBadFile = errors.New("a file of the database URL's TLS settings cannot be used: want sslrootcert, sslcert and sslkey (PGSSLROOTCERT, PGSSLCERT " +
	"and PGSSLKEY where the URL has none; also servicefile) to name files that exist, that the user this runs as can read, and that are in PEM form")

// urlError says in our own words what the parser found.
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
	return errBadURL
}

// settingName is what a parameter of a connection is called. What does not look like one is a piece of
// something else, perhaps of a password with a space in it.
var settingName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_.]*$`)

// hostName is a name or an IPv4 or IPv6 address.
var hostName = regexp.MustCompile(`^[A-Za-z0-9._:%-]+$`)

// hosts lists where a connection is tried.
func hosts(c *pgx.ConnConfig) []*pgconn.FallbackConfig {
	return append([]*pgconn.FallbackConfig{{Host: c.Host, Port: c.Port, TLSConfig: c.TLSConfig}}, c.Fallbacks...)
}

// parseDatabaseURL also refuses what the parser takes for something else than was meant: a password
// with a / or # in it that was not escaped becomes, in part, the name of the database.
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
	// One round trip and no named statement: works behind a transaction pooler.
	if c.DefaultQueryExecMode == pgx.QueryExecModeCacheStatement {
		c.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe
	}
	return config, nil
}

// connect opens the one connection that a command needs.
func (s *settings) connect(ctx context.Context) (*pgx.Conn, error) {
	return s.connectWith(ctx, s.pool.ConnConfig.Copy())
}

// connectWriting opens one that leads to a primary which takes writes.
func (s *settings) connectWriting(ctx context.Context) (*pgx.Conn, error) {
	config := s.pool.ConnConfig.Copy()
	config.ValidateConnect = refuseReadOnly
	return s.connectWith(ctx, config)
}

func (s *settings) connectWith(ctx context.Context, config *pgx.ConnConfig) (*pgx.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, connectMax)
	defer cancel()
	if err := s.usePassword(ctx, config); err != nil {
		return nil, s.connectError(err)
	}
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return nil, s.connectError(err)
	}
	return conn, nil
}

// hangUp closes a connection politely, also when ctx has ended, and does not wait long for it.
func hangUp(ctx context.Context, conn *pgx.Conn) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	_ = conn.Close(ctx) // the work is done
}

// connectPrimary opens a pool whose connections all lead to a primary that takes writes.
func (s *settings) connectPrimary(ctx context.Context, connections int) (*pgxpool.Pool, error) {
	config := s.pool.Copy()
	config.MaxConns = int32(connections)
	config.MinConns = min(config.MinConns, config.MaxConns)
	// Asked of every new connection, also after a failover. Here and not in AfterConnect, because a URL
	// with several hosts then goes on to the next one.
	config.ConnConfig.ValidateConnect = refuseReadOnly
	config.BeforeConnect = s.usePassword
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, s.connectError(err)
	}
	first, cancel := context.WithTimeout(ctx, connectMax)
	defer cancel()
	if err := pool.Ping(first); err != nil {
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
SELECT pg_is_in_recovery(), current_setting('transaction_read_only')::bool`

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

// connectError replaces what the driver says, which repeats parts of the URL.
func (s *settings) connectError(err error) error {
	return fmt.Errorf("cannot connect to the database at %s: %s", s.target(), connectReason(err))
}

// connectReason is made of our own words, of SQLSTATEs, and of texts that come from the network or from
// certificates.
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
		return serverReason(server.Code)
	case errors.Is(err, syscall.ECONNREFUSED):
		return "connection refused: check host and port, and that PostgreSQL runs"
	case errors.Is(err, syscall.ENOENT):
		return "the socket does not exist: check the host, and that PostgreSQL runs"
	case errors.As(err, &dns):
		return "the host name is not known: check the host"
	case errors.As(err, &certificate), errors.As(err, &unknownAuthority):
		return "its TLS certificate is not trusted, or is of another host: set sslrootcert to the authority that signed it, and the host to a name that it has"
	case strings.Contains(err.Error(), "server refused TLS"):
		return "it does not offer TLS: turn ssl on there; sslmode=disable with --insecure if you trust the network"
	case errors.Is(err, context.DeadlineExceeded), pgconn.Timeout(err):
		return fmt.Sprintf("no answer within %v: check host and port, and the network", connectMax)
	case errors.Is(err, context.Canceled):
		return "interrupted"
	}
	return "the connection failed: check host, port and TLS, and see the server's log"
}

func serverReason(code string) string {
	switch code {
	case "28P01":
		return "user or password is wrong (28P01)"
	case "28000":
		return "the server does not let this user in from here: check the user and pg_hba.conf (28000)"
	case "3D000":
		return "this database does not exist: create it, or check the name (3D000)"
	case "42501":
		return "the role may not connect: GRANT CONNECT (42501)"
	case "53300":
		return "too many connections: raise max_connections or close some (53300)"
	case "57P03":
		return "the server is starting up or shutting down: try again (57P03)"
	case "42704":
		return "the server does not know a parameter of the URL (42704)"
	}
	return "the server refuses with SQLSTATE " + code + ": see its log"
}

var plainName = regexp.MustCompile(`^[A-Za-z0-9_.-]+$`)

// target says where a connection goes, as host:port/dbname: never the user, never the password.
func (s *settings) target() string {
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
	case !plainName.MatchString(name):
		name = "(a name that is not shown)"
	}
	return strings.Join(addresses, ",") + "/" + name
}

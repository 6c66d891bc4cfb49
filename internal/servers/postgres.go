package servers

import (
	"cmp"
	"context"
	"crypto/rand"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/moby/moby/api/types/container"
	"github.com/testcontainers/testcontainers-go"
)

const postgresImage = "postgres:18"

// PostgresOptions are the options of StartPostgres. The zero value uses the server that the
// environment names, or what the machine has.
type PostgresOptions struct {
	// DatabaseURL is the URL of a server to use. Default: the environment's DATABASE_URL.
	DatabaseURL string
	// Own asks for a server that no other program uses: the environment's DATABASE_URL is ignored.
	Own bool
	// Embedded asks for downloaded binaries even if there are a DATABASE_URL and a Docker engine.
	Embedded bool
	// InMemory asks for data in memory, where there is room: a database is then created in a tenth of
	// the time. Containers that are Own keep theirs on disk, because a kill would lose them.
	InMemory bool
	// Parameters are server settings, as in postgres -c name=value. An external server ignores
	// them.
	Parameters map[string]string
}

// Postgres is a running PostgreSQL.
type Postgres struct {
	Server

	URL string // of a maintenance database, as a superuser unless it is external
}

// StartPostgres starts a PostgreSQL, or connects to an external one, and returns once it answers.
// The caller has to call Stop.
func StartPostgres(ctx context.Context, opts PostgresOptions) (*Postgres, error) {
	address := opts.DatabaseURL
	if address == "" && !opts.Own {
		address = env("DATABASE_URL")
	}
	kind, err := choose(ctx, opts.Embedded || preload() != "", address)
	if err != nil {
		return nil, fmt.Errorf("start PostgreSQL: %w", err)
	}
	p := &Postgres{Server: Server{Kind: kind, backend: external}, URL: address}
	p.ready = p.connect
	switch kind {
	case KindExternal:
		err = p.connect(ctx)
	case KindContainer:
		err = launch(ctx, func(port int) (*Server, error) { return p.inContainer(ctx, port, opts) })
	case KindEmbedded:
		var binaries string
		if binaries, err = postgresBinaries(ctx); err == nil {
			err = launch(ctx, func(port int) (*Server, error) { return p.fromBinaries(ctx, port, binaries, opts) })
		}
	}
	if err != nil && replaceable(ctx, kind) {
		return embeddedInstead(err, func() (*Postgres, error) { opts.Embedded = true; return StartPostgres(ctx, opts) })
	}
	if err != nil {
		return nil, fmt.Errorf("start PostgreSQL (%s): %w", kind, err)
	}
	return p, nil
}

// connect checks that the server answers queries, and reads its version for the description.
func (p *Postgres) connect(ctx context.Context) error {
	conn, err := pgx.Connect(ctx, p.URL)
	if err != nil {
		return err
	}
	var version string
	err = conn.QueryRow(ctx, "SHOW server_version").Scan(&version)
	config := conn.Config()
	_ = conn.Close(ctx) // only the answer matters
	if err != nil {
		return err
	}
	// Distributions append their own: "18.4 (Debian 18.4-1)"
	number, _, _ := strings.Cut(version, " ")
	p.Description = fmt.Sprintf("PostgreSQL %s %s (%s:%d)", number, p.Kind, config.Host, config.Port)
	return nil
}

func (p *Postgres) inContainer(ctx context.Context, port int, opts PostgresOptions) (*Server, error) {
	password := rand.Text()
	p.URL = localURL(port, password)
	var err error
	p.backend, err = createContainer(ctx, port, testcontainers.ContainerRequest{
		Image:        postgresImage,
		ExposedPorts: []string{"5432/tcp"},
		Env:          map[string]string{"POSTGRES_PASSWORD": password},
		Cmd:          append([]string{"postgres"}, flags(opts.Parameters)...),
		HostConfigModifier: func(host *container.HostConfig) {
			host.ShmSize = 256 << 20 // Docker's 64 MB are too few for parallel queries
			if opts.InMemory && !opts.Own {
				host.Tmpfs = map[string]string{"/var/lib/postgresql": "size=4g"}
			}
		},
	})
	return &p.Server, err
}

func (p *Postgres) fromBinaries(ctx context.Context, port int, binaries string, opts PostgresOptions) (*Server, error) {
	password := rand.Text()
	p.URL = localURL(port, password)
	settings := map[string]string{
		"listen_addresses": "127.0.0.1",
		"port":             strconv.Itoa(port),
		// The default socket directory is shared by all servers of the machine.
		"unix_socket_directories": "",
	}
	maps.Copy(settings, opts.Parameters)
	var err error
	p.backend, err = createCluster(ctx, binaries, password, flags(settings), opts)
	return &p.Server, err
}

// localURL has a different password for each server: any user of the machine can reach the port,
// and a superuser of PostgreSQL can run programs.
func localURL(port int, password string) string {
	u := url.URL{
		Scheme: "postgres", Host: "127.0.0.1:" + strconv.Itoa(port), Path: "/postgres",
		User: url.UserPassword("postgres", password), RawQuery: "sslmode=disable",
	}
	return u.String()
}

func flags(parameters map[string]string) []string {
	list := make([]string, 0, 2*len(parameters))
	for _, name := range slices.SortedFunc(maps.Keys(parameters), cmp.Compare) {
		list = append(list, "-c", name+"="+parameters[name])
	}
	return list
}

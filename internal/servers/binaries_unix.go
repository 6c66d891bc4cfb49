//go:build linux || darwin

package servers

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	embeddedpostgres "github.com/fergusstrange/embedded-postgres"

	"github.com/effectonce/effectonce/internal/pause"
)

// postgresVersion is the version for tests and commands. EMBEDDED_POSTGRES may name another of the
// supported majors.
func postgresVersion() (embeddedpostgres.PostgresVersion, error) {
	switch major := env("EMBEDDED_POSTGRES"); major {
	case "14":
		return embeddedpostgres.V14, nil
	case "15":
		return embeddedpostgres.V15, nil
	case "16":
		return embeddedpostgres.V16, nil
	case "17":
		return embeddedpostgres.V17, nil
	case "", "18":
		return embeddedpostgres.V18, nil
	default:
		return "", fmt.Errorf("EMBEDDED_POSTGRES=%s: want 14 to 18", major)
	}
}

// builtinLocales reports whether the version has locales of its own: from 17 on.
func builtinLocales() bool {
	major := env("EMBEDDED_POSTGRES")
	return major == "" || major >= "17"
}

// ordinary is the user and group ("nobody") that runs PostgreSQL if this process is root.
const ordinary = 65534

// postgresBinaries returns the directory of PostgreSQL's programs. The first process that needs
// them downloads them. A rename puts them in place, so they are complete or missing.
func postgresBinaries(ctx context.Context) (string, error) {
	version, err := postgresVersion()
	if err != nil {
		return "", err
	}
	cache, err := cacheDir(version)
	if err != nil {
		return "", err
	}
	binaries := filepath.Join(cache, "postgres")
	if _, err := os.Stat(binaries); err == nil {
		return binaries, nil
	}
	unlock, err := lock(ctx, filepath.Join(cache, "lock"))
	if err != nil {
		return "", err
	}
	defer unlock()
	if _, err := os.Stat(binaries); err == nil {
		return binaries, nil // downloaded by the process that held the lock
	}
	scratch, err := os.MkdirTemp(cache, "download-")
	if err != nil {
		return "", err
	}
	defer func() { _ = os.RemoveAll(scratch) }()
	port, err := freePort(ctx)
	if err != nil {
		return "", err
	}
	if err := download(scratch, version, port); err != nil {
		return "", fmt.Errorf("get PostgreSQL %s (not needed with DATABASE_URL or a Docker engine): %w", version, err)
	}
	return binaries, os.Rename(filepath.Join(scratch, "postgres"), binaries)
}

// download leaves the programs in the directory "postgres" of scratch. The library cannot only
// download: it also starts a server, which fails for root. It creates its own directory once the
// programs are complete.
func download(scratch string, version embeddedpostgres.PostgresVersion, port int) error {
	at := func(name string) string { return filepath.Join(scratch, name) }
	server := embeddedpostgres.NewDatabase(embeddedpostgres.DefaultConfig().
		Version(version).Port(uint32(port)).Logger(io.Discard).
		CachePath(at("archive")).BinariesPath(at("postgres")).RuntimePath(at("run")).DataPath(at("data")).
		Locale("C").Encoding("UTF8").StartTimeout(time.Minute).
		StartParameters(map[string]string{"listen_addresses": "127.0.0.1", "unix_socket_directories": ""}))
	// The library downloads with the default client. Its connection would look like a leak to
	// tests.
	defer http.DefaultClient.CloseIdleConnections()
	err := server.Start()
	if err == nil {
		return server.Stop()
	}
	if _, incomplete := os.Stat(at("run")); incomplete != nil {
		return err
	}
	return nil
}

// cacheDir returns the directory that keeps the programs between runs. For root it is one that the
// ordinary user can enter, unlike root's home. Only these two users may own it, because its
// programs are executed.
func cacheDir(version embeddedpostgres.PostgresVersion) (string, error) {
	name := "effectonce-postgres-" + string(version)
	dir := filepath.Join(os.TempDir(), name)
	if os.Geteuid() != 0 {
		base, err := os.UserCacheDir()
		if err != nil {
			return "", fmt.Errorf("find a directory for PostgreSQL's programs: %w", err)
		}
		dir = filepath.Join(base, name)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil { //nolint:gosec // another user runs what is in it
		return "", err
	}
	info, err := os.Lstat(dir)
	if err != nil {
		return "", err
	}
	owner := int(info.Sys().(*syscall.Stat_t).Uid)
	trusted := owner == os.Geteuid() || os.Geteuid() == 0 && owner == ordinary
	if !info.IsDir() || !trusted || info.Mode().Perm()&0o022 != 0 {
		return "", fmt.Errorf("%s is not a directory that only this user can write to: remove it", dir)
	}
	return dir, nil
}

// lock excludes other processes until unlock, or until this process ends.
func lock(ctx context.Context, file string) (unlock func(), err error) {
	f, err := os.OpenFile(file, os.O_CREATE|os.O_RDWR, 0o600) //nolint:gosec // in a directory that cacheDir vouches for
	if err != nil {
		return nil, err
	}
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		switch {
		case err == nil:
			return func() { _ = f.Close() }, nil
		case !errors.Is(err, syscall.EWOULDBLOCK) || !pause.For(ctx, pollEvery):
			return nil, errors.Join(fmt.Errorf("lock %s: %w", file, err), ctx.Err(), f.Close())
		}
	}
}

// credential is what PostgreSQL's programs run with: they refuse root. Nil: the credentials of this
// process.
func credential() *syscall.Credential {
	if os.Geteuid() != 0 {
		return nil
	}
	return &syscall.Credential{Uid: ordinary, Gid: ordinary}
}

// giveAway makes the ordinary user the owner of what root created for it.
func giveAway(path string) error {
	if os.Geteuid() != 0 {
		return nil
	}
	if err := os.Lchown(path, ordinary, ordinary); err != nil {
		return fmt.Errorf("give %s to user %s: %w", path, strconv.Itoa(ordinary), err)
	}
	return nil
}

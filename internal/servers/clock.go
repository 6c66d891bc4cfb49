package servers

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// clockSource shifts the clock of a program that asks libc for the time, as PostgreSQL does. (libfaketime cannot be used
// for it: within epoll_wait it tells signal handlers the real time, so that a server whose clock is ahead never ends
// a statement by its timeouts.) The monotonic clock stays as it is.
const clockSource = `
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t id, struct timespec *t) {
	int failed = syscall(SYS_clock_gettime, id, t);
	if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) t->tv_sec += OFFSET;
	return failed;
}

int gettimeofday(struct timeval *restrict t, void *restrict zone) {
	struct timespec now;
	(void)zone;
	if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
	t->tv_sec = now.tv_sec;
	t->tv_usec = now.tv_nsec / 1000;
	return 0;
}

time_t time(time_t *t) {
	struct timespec now;
	if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
	if (t) *t = now.tv_sec;
	return now.tv_sec;
}
`

// ErrNoCompiler says that PostgresOptions.ClockOffset asks for a C compiler, which is not there.
var ErrNoCompiler = errors.New("a C compiler (cc), with which a server's clock is shifted, is not there")

// clockLibrary makes the library, in dir, that shifts the clock of a program which loads it first.
func clockLibrary(ctx context.Context, dir string, offset time.Duration) (string, error) {
	compiler, err := exec.LookPath("cc")
	if err != nil {
		return "", fmt.Errorf("%w: %w", ErrNoCompiler, err)
	}
	library := filepath.Join(dir, "clock.so")
	cmd := exec.CommandContext(ctx, compiler, "-shared", "-fPIC", "-O2", fmt.Sprintf("-DOFFSET=%d", int64(offset/time.Second)), "-o", library, "-x", "c", "-") //nolint:gosec // our own values
	cmd.Stdin = strings.NewReader(clockSource)
	if output, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("compile what shifts the server's clock: %w:\n%s", err, tail(output))
	}
	return library, nil
}

const clockSlop = time.Minute // what the way there and back may take

// checkClock proves that the server's clock is as far from this process's as was asked for: a library that the loader
// passes over is not told otherwise.
func (p *Postgres) checkClock(ctx context.Context, want time.Duration) error {
	conn, err := pgx.Connect(ctx, p.URL)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(ctx) }()
	var there time.Time
	if err := conn.QueryRow(ctx, "SELECT clock_timestamp()").Scan(&there); err != nil {
		return err
	}
	if got := time.Until(there); (got - want).Abs() > clockSlop {
		return fmt.Errorf("its clock is %v ahead of this process's: want %v", got, want)
	}
	return nil
}

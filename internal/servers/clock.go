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

// clockSource shifts the clock of a program that reads the time through libc, as PostgreSQL does.
// (libfaketime does not work for this: within epoll_wait it gives signal handlers the real time, so
// that a server whose clock is ahead never ends a statement by its timeouts.) The monotonic clock
// does not change.
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

// ErrNoCompiler means that PostgresOptions.ClockOffset needs a C compiler, and there is none.
var ErrNoCompiler = errors.New("no C compiler (cc): one is needed to shift a server's clock")

// clockLibrary builds the library, in dir, that shifts the clock of a program which preloads it.
func clockLibrary(ctx context.Context, dir string, offset time.Duration) (string, error) {
	compiler, err := exec.LookPath("cc")
	if err != nil {
		return "", fmt.Errorf("%w: %w", ErrNoCompiler, err)
	}
	library := filepath.Join(dir, "clock.so")
	cmd := exec.CommandContext(ctx, compiler, "-shared", "-fPIC", "-O2", fmt.Sprintf("-DOFFSET=%d", int64(offset/time.Second)), "-o", library, "-x", "c", "-") //nolint:gosec // our own values
	cmd.Stdin = strings.NewReader(clockSource)
	if output, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("compile the library that shifts the server's clock: %w:\n%s", err, tail(output))
	}
	return library, nil
}

const clockSlop = time.Minute // allowance for the round trip

// checkClock checks that the server's clock differs from this process's by the requested offset: a
// loader that skips the library does not report that.
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

package bench

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
)

// processes is where Linux shows processes.
const processes = "/proc"

// ticksPerSecond is the unit of CPU times there, on every Linux.
const ticksPerSecond = 100

// server is a PostgreSQL server whose processes are on this machine: started by this process, as a
// service, or in a container.
type server struct{ postmaster int }

// findServer returns nil for a server whose processes are not visible: on another machine, or not
// on Linux.
func findServer(ctx context.Context, conn *pgx.Conn) (*server, error) {
	var pid int
	var port *int
	if err := conn.QueryRow(ctx, backendSQL).Scan(&pid, &port); err != nil {
		return nil, fmt.Errorf("read the PID of the server process: %w", err)
	}
	entries, err := os.ReadDir(processes)
	if err != nil {
		return nil, nil //nolint:nilerr,nilnil // not measured here
	}
	for _, entry := range entries {
		if found, err := strconv.Atoi(entry.Name()); err == nil && isBackend(found, pid, port) {
			if stat := readStat(found); stat != nil {
				return &server{postmaster: stat.parent}, nil
			}
		}
	}
	return nil, nil //nolint:nilnil // not measured here
}

// isBackend identifies a process by its PID where the server runs, which may be a container, and by
// its title, which contains the client's port.
func isBackend(process, pid int, port *int) bool {
	status, err := os.ReadFile(filepath.Join(processes, strconv.Itoa(process), "status"))
	if err != nil {
		return false
	}
	_, after, _ := strings.Cut(string(status), "NSpid:")
	line, _, _ := strings.Cut(after, "\n")
	numbers := strings.Fields(line)
	if len(numbers) == 0 || numbers[len(numbers)-1] != strconv.Itoa(pid) {
		return false
	}
	title, err := os.ReadFile(filepath.Join(processes, strconv.Itoa(process), "cmdline"))
	if err != nil || !strings.HasPrefix(string(title), "postgres:") {
		return false
	}
	return port == nil || strings.Contains(string(title), "("+strconv.Itoa(*port)+")")
}

// lookMax is how often a reading is repeated because a backend ended during it.
const lookMax = 10

// cpuSeconds is what the whole server has used so far; nil: unknown. The time of an ended backend
// is in its parent's time for children: a backend that ends during the reading would be counted
// twice or not at all.
func (s *server) cpuSeconds() *float64 {
	if s == nil {
		return nil
	}
	for range lookMax {
		before, running := readStat(s.postmaster), s.running()
		after := readStat(s.postmaster)
		if before == nil || after == nil {
			return nil
		}
		if before.children == after.children {
			seconds := float64(after.own+after.children+running) / ticksPerSecond
			return &seconds
		}
	}
	return nil
}

// running is what the running processes of the server have used, in ticks.
func (s *server) running() (ticks int) {
	entries, _ := os.ReadDir(processes) // it existed before
	for _, entry := range entries {
		if process, err := strconv.Atoi(entry.Name()); err == nil {
			if stat := readStat(process); stat != nil && stat.parent == s.postmaster {
				ticks += stat.own
			}
		}
	}
	return ticks
}

// stat is what /proc shows of a process.
type stat struct{ parent, own, children int }

// readStat returns nil for a process that does not exist.
func readStat(process int) *stat {
	text, err := os.ReadFile(filepath.Join(processes, strconv.Itoa(process), "stat"))
	if err != nil {
		return nil
	}
	// The name may contain anything
	_, after, _ := strings.Cut(string(text[strings.LastIndexByte(string(text), ')')+1:]), " ")
	fields := strings.Fields(after)
	const parent, first, last = 1, 11, 14
	if len(fields) <= last {
		return nil
	}
	var times [last - first + 1]int
	for i := range times {
		times[i], _ = strconv.Atoi(fields[first+i]) // the kernel wrote it
	}
	found := &stat{own: times[0] + times[1], children: times[2] + times[3]}
	found.parent, _ = strconv.Atoi(fields[parent])
	return found
}

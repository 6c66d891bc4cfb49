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

// processes is where Linux shows them.
const processes = "/proc"

// ticksPerSecond is the unit of CPU times there, on every Linux.
const ticksPerSecond = 100

// server is a PostgreSQL server whose processes are on this machine: run by this process, as a service, or in a container.
type server struct{ postmaster int }

// findServer returns nil for a server whose processes are not to be seen: on another machine, or not on Linux.
func findServer(ctx context.Context, conn *pgx.Conn) (*server, error) {
	var pid int
	var port *int
	if err := conn.QueryRow(ctx, backendSQL).Scan(&pid, &port); err != nil {
		return nil, fmt.Errorf("ask which process of the server this is: %w", err)
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

// isBackend tells a process by the number that it has where the server runs, which may be a container, and by its title,
// which has the client's port.
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

// lookMax is how often a look is taken again because a backend ended meanwhile.
const lookMax = 10

// cpuSeconds is what the whole server has used so far; nil: not known. Backends that ended are in what their parent
// waited for: one that does so during the look would be counted twice or not at all.
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

// running is what the processes of the server have used that have not ended, in ticks.
func (s *server) running() (ticks int) {
	entries, _ := os.ReadDir(processes) // it was there before
	for _, entry := range entries {
		if process, err := strconv.Atoi(entry.Name()); err == nil {
			if stat := readStat(process); stat != nil && stat.parent == s.postmaster {
				ticks += stat.own
			}
		}
	}
	return ticks
}

// stat is what /proc tells of a process.
type stat struct{ parent, own, children int }

// readStat returns nil for a process that is not there.
func readStat(process int) *stat {
	text, err := os.ReadFile(filepath.Join(processes, strconv.Itoa(process), "stat"))
	if err != nil {
		return nil
	}
	_, after, _ := strings.Cut(string(text[strings.LastIndexByte(string(text), ')')+1:]), " ") // the name may have anything in it
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

package worker

import (
	"context"
	"math"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/fleet"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/ledger"
	"github.com/effectonce/effectonce/internal/crashpoint"
)

// prefixes of the crash points that a role passes.
var prefixes = map[string]string{RoleRelay: "relay.", RoleConsumer: "consumer.", RoleService: "key."} //nolint:gochecknoglobals // a constant

// frozenFor is how long a process that freezes itself stays so: longer than leases and sessions.
const frozenFor = 8 * time.Second

// arm draws a point between two durable steps of the engine, at which this process ends or freezes:
// random kills seldom hit one. It does so once, and only until Job.Until.
func (j Job) arm(ctx context.Context) error {
	random := rand.New(rand.NewPCG(j.Seed, uint64(j.Place)<<32|uint64(j.Incarnation))) //nolint:gosec // a seed
	var points []string
	for _, name := range crashpoint.All() {
		if prefix := prefixes[j.Role]; prefix != "" && strings.HasPrefix(name, prefix) {
			points = append(points, name)
		}
	}
	if !time.Now().Before(j.Until) || len(points) == 0 || random.IntN(3) == 0 {
		return nil
	}
	book, err := ledger.Open(j.Ledgers, j.Name+"-points")
	if err != nil {
		return err
	}
	chosen, freeze := points[random.IntN(len(points))], random.IntN(3) == 0
	var mu sync.Mutex
	left := int(math.Exp(random.Float64() * math.Log(500))) // small numbers are as likely as large ones
	crashpoint.Arm(func(name string) {
		if name != chosen {
			return
		}
		mu.Lock()
		defer mu.Unlock()
		if left--; left != 0 || !time.Now().Before(j.Until) {
			return
		}
		if !freeze {
			_ = book.Write(ledger.Struck, "exit-at", name)
			os.Exit(ExitStatus) //nolint:forbidigo // as a crash would
		}
		_ = book.Write(ledger.Struck, "freeze-at", name)
		fleet.FreezeSelf(ctx, frozenFor)
	})
	return nil
}

package consumertest

import (
	"fmt"
	"sync"

	"github.com/google/uuid"

	"github.com/effectonce/effectonce/consumer"
)

// Calls is a stand-in for other systems. It records the calls that a handler makes to them. Verify
// runs the handler again after crashes, parking and retry, and fails if a message's call is made
// under several keys: the other system would act again. The zero value works. Calls is safe for
// concurrent use.
type Calls struct {
	mu   sync.Mutex
	keys map[call]map[string]struct{}
}

type call struct {
	message uuid.UUID
	step    string
}

// Made records a call for a message: step names the call, and key is the key under which it is
// made.
func (c *Calls) Made(msg *consumer.Message, step, key string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.keys == nil {
		c.keys = map[call]map[string]struct{}{}
	}
	at := call{msg.ID, step}
	if c.keys[at] == nil {
		c.keys[at] = map[string]struct{}{}
	}
	c.keys[at][key] = struct{}{}
}

// problems lists the calls that were made under several keys.
func (c *Calls) problems() (list []string) {
	if c == nil {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for at, keys := range c.keys {
		if len(keys) > 1 {
			list = append(list, fmt.Sprintf("call %q of message %s was made under %d keys: the other system would act again; use msg.CallKey(%q)", at.step, at.message, len(keys), at.step))
		}
	}
	return list
}

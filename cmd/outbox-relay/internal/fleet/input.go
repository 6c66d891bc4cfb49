package fleet

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
)

// ReadInput decodes what Spec.Input sent, in a child. When stdin ends, however that happened, no
// parent remains that could stop this process, and orphaned is called, which has to end it at once.
func ReadInput(stdin io.Reader, job any, orphaned func()) error {
	input := bufio.NewReader(stdin)
	line, err := input.ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, job)
	}
	if err != nil {
		return fmt.Errorf("this command is started by another one, not by people: no job on standard input: %w", err)
	}
	go func() {
		_, _ = io.Copy(io.Discard, input)
		orphaned()
	}()
	return nil
}

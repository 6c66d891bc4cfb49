package watermillsink

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/effectonce/effectonce/relay"
)

// message makes the Watermill message of a row, or returns an error for what metadata cannot hold.
// It shares no memory with the row: an abandoned call, or a publisher that keeps messages, outlives
// the row.
func (s *Sink) message(ctx context.Context, row *relay.Message) (*message.Message, error) {
	made := message.NewMessageWithContext(ctx, row.ID.String(), bytes.Clone(row.Payload))
	if err := s.setHeaders(made.Metadata, row); err != nil {
		return nil, err
	}
	if row.Key != nil {
		made.Metadata[s.cfg.KeyName] = string(row.Key)
	}
	if row.Payload == nil {
		made.Metadata[MetadataTombstone] = "true"
	}
	return made, nil
}

func (s *Sink) setHeaders(metadata message.Metadata, row *relay.Message) error {
	var problems []error
	var nulls []string
	times := make(map[string]int, len(row.Headers))
	for _, h := range row.Headers {
		times[h.Name]++
	}
	for _, h := range row.Headers {
		value := string(h.Value)
		earlier, again := metadata[h.Name]
		switch {
		case reserved(h.Name) || h.Name == s.cfg.KeyName:
			problems = append(problems, fmt.Errorf("header %.60q: the metadata of this name has another meaning: use another name", h.Name))
		case times[h.Name] == 1:
			metadata[h.Name] = value
			if h.Value == nil {
				nulls = append(nulls, h.Name)
			}
		case s.cfg.HeaderSeparator == "":
			if !again { // report it once
				metadata[h.Name] = value
				problems = append(problems, fmt.Errorf("header %.60q occurs %d times, metadata has one value for each name: publish it once, or set Config.HeaderSeparator", h.Name, times[h.Name]))
			}
		case h.Value == nil:
			problems = append(problems, fmt.Errorf("header %.60q occurs %d times and one value is null, which cannot be joined", h.Name, times[h.Name]))
		case strings.Contains(value, s.cfg.HeaderSeparator):
			problems = append(problems, fmt.Errorf("header %.60q occurs %d times and contains Config.HeaderSeparator %q: it could not be split again", h.Name, times[h.Name], s.cfg.HeaderSeparator))
		case again:
			metadata[h.Name] = earlier + s.cfg.HeaderSeparator + value
		default:
			metadata[h.Name] = value
		}
	}
	if len(nulls) > 0 {
		list, err := json.Marshal(nulls)
		problems = append(problems, err)
		metadata[MetadataNullHeaders] = string(list)
	}
	return errors.Join(problems...)
}

package dedup

import "time"

// Numbered returns a consumer that was never registered.
func Numbered(id int) Consumer { return Consumer{id: int32(id)} }

// SetLookMax makes the time for reading a day under its lock shorter than the constant.
func (c *Claims) SetLookMax(d time.Duration) { c.lookMax = d }

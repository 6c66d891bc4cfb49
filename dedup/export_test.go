package dedup

// Numbered returns a consumer that was never registered.
func Numbered(id int) Consumer { return Consumer{id: int32(id)} }

package relay

// FetchSQL is the statement of the plan's test.
const FetchSQL = fetchSQL

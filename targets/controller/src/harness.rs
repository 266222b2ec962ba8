//! Any bytes as the life of a controller, for fuzzing.
#[derive(Debug)]
/** x */
pub struct Harness;

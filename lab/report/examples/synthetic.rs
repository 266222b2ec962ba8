//! Writes a synthetic run directory, to test reports of any size:
//! `cargo run --example synthetic -- DIRECTORY CELLS [REPETITIONS]`.

#[path = "../tests/synthetic/mod.rs"]
#[allow(clippy::unwrap_used)]
mod synthetic;

use std::error::Error;
use std::path::Path;

use lab_experiments::RunWriter;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [directory, cells, rest @ ..] = arguments.as_slice() else {
        return Err("usage: synthetic DIRECTORY CELLS [REPETITIONS]".into());
    };
    let repetitions = rest.first().map_or(Ok(3), |text| text.parse())?;
    let run = synthetic::run(cells.parse()?, repetitions);
    drop(RunWriter::create(Path::new(directory), &run.machine, &run.plan)?);
    // `RunWriter` syncs each line to disk, which would take minutes here.
    let mut text = String::new();
    for record in &run.records {
        text.push_str(&serde_json::to_string(record)?);
        text.push('\n');
    }
    std::fs::write(Path::new(directory).join("results.jsonl"), text)?;
    println!("{} records in {directory}", run.records.len());
    Ok(())
}

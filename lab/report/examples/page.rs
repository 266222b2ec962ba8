//! Renders the report of a run directory and prints how long each step took:
//! `cargo run --release --example page -- DIRECTORY OUTPUT`.

use std::error::Error;
use std::path::Path;
use std::time::Instant;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [directory, output] = arguments.as_slice() else {
        return Err("usage: page DIRECTORY OUTPUT".into());
    };
    let started = Instant::now();
    let run = lab_experiments::RunDirectory::open(Path::new(directory))?;
    let read = started.elapsed();
    let page = lab_report::page::render_html(&run)?;
    let rendered = started.elapsed();
    std::fs::write(output, &page)?;
    println!(
        "{} records: read in {:.2} s, page of {:.1} MB rendered in {:.2} s",
        run.records.len(),
        read.as_secs_f64(),
        page.len() as f64 / 1e6,
        (rendered - read).as_secs_f64()
    );
    Ok(())
}

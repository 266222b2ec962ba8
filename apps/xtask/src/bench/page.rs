//! Time to generate the lab's HTML report of a run with many cells, and to load it in a browser.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};

use super::examples::Example;
use super::metric::BenchMetric;
use super::process::{ChildProcess, describe};
use super::{Measurement, RunContext, RunOutcome};

/// Generates the synthetic run.
pub(super) const SYNTHETIC: Example = Example { package: "ringbolt-lab-report", name: "synthetic" };

const CELLS: &str = "10000";
const RUN_MAX: Duration = Duration::from_secs(120);
const BROWSERS: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];
/// Writes the milliseconds from the start of navigation to the load event into the document.
const LOAD_TIMER: &str = "<script>addEventListener('load', () => \
                      document.documentElement.setAttribute('data-loaded-ms', performance.now()))</script>";

pub(super) fn page(context: &RunContext<'_>) -> anyhow::Result<RunOutcome> {
    let run = context.directory.file("run");
    if !run.exists() {
        let mut command = Command::new(context.examples.path(SYNTHETIC)?);
        command.arg(&run).args([CELLS, "1"]);
        finish(context, &mut command, "synthetic")?;
    }
    let file = context.directory.file("report.html");
    let mut command = Command::new(context.binary);
    command.args(["lab", "report"]).arg(&run).arg("--output").arg(&file);
    let begun = Instant::now();
    finish(context, &mut command, "report")?;
    let mut sample = Measurement::default();
    sample.values.insert(BenchMetric::RenderMs, begun.elapsed().as_secs_f64() * 1e3);
    sample.commands.push(describe(&command));
    if let Some(browser) = browser() {
        let mut command = open(context, browser, &file)?;
        finish(context, &mut command, "browser")?;
        let document = std::fs::read_to_string(context.directory.file("browser.out"))?;
        let ms = loaded_ms(&document).context("the browser did not load the page")?;
        sample.values.insert(BenchMetric::LoadMs, ms);
        sample.commands.push(describe(&command));
    } else {
        sample.commands.push(format!("SKIPPED: loading the page: no {} in PATH", BROWSERS.join(", ")));
    }
    Ok(RunOutcome::Measured(sample))
}

fn finish(context: &RunContext<'_>, command: &mut Command, log: &str) -> anyhow::Result<()> {
    let mut process = ChildProcess::start(command, context.directory, log)?;
    let status = process.wait(RUN_MAX).with_context(|| describe(command))?;
    let tail = context.directory.tail(&format!("{log}.err"));
    ensure!(status.success(), "{}: {status}: {tail}", describe(command));
    Ok(())
}

fn browser() -> Option<&'static str> {
    let works = |name: &&str| {
        Command::new(name).arg("--version").output().is_ok_and(|output| output.status.success())
    };
    BROWSERS.into_iter().find(works)
}

/// The command that loads a copy of the page with [`LOAD_TIMER`] in a browser with a new profile.
fn open(context: &RunContext<'_>, browser: &str, page: &Path) -> anyhow::Result<Command> {
    let timed_page = context.directory.file("timed.html");
    let text = std::fs::read_to_string(page)?;
    let timed_text = text.replacen("<head>", &format!("<head>{LOAD_TIMER}"), 1);
    ensure!(timed_text.len() > text.len(), "the page has no head");
    std::fs::write(&timed_page, timed_text)?;
    let mut command = Command::new(browser);
    // Chromium refuses to run as root with its sandbox.
    command.args(["--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"]);
    command.arg(format!("--user-data-dir={}", context.directory.folder("profile")?.display()));
    command.arg(format!("file://{}", timed_page.display()));
    Ok(command)
}

fn loaded_ms(document: &str) -> Option<f64> {
    let (_, rest) = document.split_once("data-loaded-ms=\"")?;
    rest.split('"').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_load_time_is_read_from_the_document() {
        assert_eq!(loaded_ms("<html lang=\"en\" data-loaded-ms=\"1203.5\"><head>"), Some(1203.5));
        assert_eq!(loaded_ms("<html><head>"), None);
    }
}

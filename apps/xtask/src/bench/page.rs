//! The lab's report of a run with many cells: how long it takes to make, and to open.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};

use super::examples::Example;
use super::metric::Metric;
use super::process::{Process, describe};
use super::{Outcome, Sample, Setting};

/// Makes up the run.
pub(super) const SYNTHETIC: Example = Example { package: "ringbolt-report", name: "synthetic" };

const CELLS: &str = "10000";
const RUN_MAX: Duration = Duration::from_secs(120);
const BROWSERS: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];
/// Says in the document how long it took from the start of the navigation until it was loaded.
const LOADED: &str = "<script>addEventListener('load', () => \
                      document.documentElement.setAttribute('data-loaded-ms', performance.now()))</script>";

pub(super) fn page(setting: &Setting<'_>) -> anyhow::Result<Outcome> {
    let run = setting.scratch.file("run");
    if !run.exists() {
        let mut command = Command::new(setting.examples.path(SYNTHETIC)?);
        command.arg(&run).args([CELLS, "1"]);
        finish(setting, &mut command, "synthetic")?;
    }
    let file = setting.scratch.file("report.html");
    let mut command = Command::new(setting.binary);
    command.args(["lab", "report"]).arg(&run).arg("--output").arg(&file);
    let begun = Instant::now();
    finish(setting, &mut command, "report")?;
    let mut sample = Sample::default();
    sample.values.insert(Metric::MadeMs, begun.elapsed().as_secs_f64() * 1e3);
    sample.commands.push(describe(&command));
    if let Some(browser) = browser() {
        let mut command = open(setting, browser, &file)?;
        finish(setting, &mut command, "browser")?;
        let document = std::fs::read_to_string(setting.scratch.file("browser.out"))?;
        let ms = loaded_ms(&document).context("the browser did not load the page")?;
        sample.values.insert(Metric::OpenedMs, ms);
        sample.commands.push(describe(&command));
    } else {
        sample.commands.push(format!("SKIPPED: opening the page: no {} in PATH", BROWSERS.join(", ")));
    }
    Ok(Outcome::Measured(sample))
}

fn finish(setting: &Setting<'_>, command: &mut Command, log: &str) -> anyhow::Result<()> {
    let mut process = Process::start(command, setting.scratch, log)?;
    let status = process.wait(RUN_MAX).with_context(|| describe(command))?;
    let tail = setting.scratch.tail(&format!("{log}.err"));
    ensure!(status.success(), "{}: {status}: {tail}", describe(command));
    Ok(())
}

fn browser() -> Option<&'static str> {
    let works = |name: &&str| {
        Command::new(name).arg("--version").output().is_ok_and(|output| output.status.success())
    };
    BROWSERS.into_iter().find(works)
}

/// The browser with a page that tells when it was loaded, and a profile of its own.
fn open(setting: &Setting<'_>, browser: &str, page: &Path) -> anyhow::Result<Command> {
    let telling = setting.scratch.file("telling.html");
    let text = std::fs::read_to_string(page)?;
    let told = text.replacen("<head>", &format!("<head>{LOADED}"), 1);
    ensure!(told.len() > text.len(), "the page has no head");
    std::fs::write(&telling, told)?;
    let mut command = Command::new(browser);
    // As root the browser has no sandbox.
    command.args(["--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"]);
    command.arg(format!("--user-data-dir={}", setting.scratch.folder("profile")?.display()));
    command.arg(format!("file://{}", telling.display()));
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
    fn a_document_says_when_it_was_loaded() {
        assert_eq!(loaded_ms("<html lang=\"en\" data-loaded-ms=\"1203.5\"><head>"), Some(1203.5));
        assert_eq!(loaded_ms("<html><head>"), None);
    }
}

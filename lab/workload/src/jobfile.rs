//! fio's job files and options: what is to be run, from text.
//!
//! A [`Plan`] is made by [`plan`] from a command line's words; job files among them are read through a
//! function that the caller gives, so that nothing here touches the machine. Sections, `[global]`,
//! `include`, comments, `${VARIABLES}` and the options of [`OPTIONS`] are understood. What is not is an
//! [`PlanError`] that names option, file and line: nothing is ever dropped.
//!
//! ```
//! use workload::jobfile::{Lookup, plan};
//! struct Nothing;
//! impl Lookup for Nothing {
//!     fn file(&self, path: &str) -> Result<String, String> { Err(format!("{path}: no such file")) }
//!     fn variable(&self, _: &str) -> Option<String> { None }
//! }
//! let words = ["--name=a", "--rw=randread", "--bs=8k", "--iodepth=4"].map(String::from);
//! let plan = plan(&words, &Nothing).unwrap();
//! assert_eq!((plan.jobs.len(), plan.jobs[0].spec.block_bytes), (1, 8192));
//! ```

use std::fmt;

mod apply;
mod options;
mod values;

pub use apply::{EngineName, Job, LogPaths};
pub use options::{OPTIONS, OptionInfo, Support};

use options::find;

/// What the parser asks of the world.
pub trait Lookup {
    /// The text of a job file.
    fn file(&self, path: &str) -> Result<String, String>;
    /// An environment variable.
    fn variable(&self, name: &str) -> Option<String>;
}

/// Where an option was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// On the command line.
    CommandLine,
    /// In a file, on a line counted from 1.
    File {
        /// Its path.
        path: String,
        /// The line.
        line: usize,
    },
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::CommandLine => write!(f, "command line"),
            Place::File { path, line } => write!(f, "{path}:{line}"),
        }
    }
}

/// What is wrong, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanError {
    /// Where it is written.
    pub place: Place,
    /// What is wrong with it, and what would be right.
    pub reason: String,
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.place {
            Place::CommandLine => write!(f, "{}", self.reason),
            Place::File { .. } => write!(f, "{}: {}", self.place, self.reason),
        }
    }
}

impl std::error::Error for PlanError {}

/// Everything that is to be run.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// The jobs, in order.
    pub jobs: Vec<Job>,
    /// Options of `[global]`, as written.
    pub globals: Vec<(String, String)>,
    /// Options of the command line that belong to no job: `output`, `eta` and their like.
    pub run: Vec<(String, String)>,
    /// The words of the command line, from which a process of a job makes the same plan.
    pub words: Vec<String>,
}

impl Plan {
    /// The value of the last option of the run with this name.
    pub fn run_option(&self, name: &str) -> Option<&str> {
        self.run.iter().rev().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }
}

/// Includes within includes; a file that includes itself ends here.
const DEPTH_MAX: usize = 16;
/// Jobs, clones not counted.
const JOBS_MAX: usize = 4096;
/// Lines of all files.
const LINES_MAX: usize = 1 << 20;

/// What is being made.
struct Planner<'a> {
    lookup: &'a dyn Lookup,
    plan: Plan,
    global: Job,
    /// The job that options go to; `None` where they go to the globals.
    current: Option<Job>,
    /// Only these sections are run, if any are named.
    sections: Vec<String>,
    lines: usize,
}

/// Plans what a command line, without the program's name, asks for. As with fio, options before the
/// first `--name` belong to all jobs that follow where there are job files, and to the first job where
/// there are none; each `--name` after the first begins another job.
pub fn plan(words: &[String], lookup: &dyn Lookup) -> Result<Plan, PlanError> {
    let mut planner = Planner {
        lookup,
        plan: Plan::default(),
        global: Job::default(),
        current: None,
        sections: Vec::new(),
        lines: 0,
    };
    let options = split(words)?;
    planner.sections =
        options.words.iter().filter(|(name, _)| name == "section").map(|(_, value)| value.clone()).collect();
    let mut open: Option<Job> = None;
    let config = options.words.iter().filter(|(name, _)| name == "config");
    planner.plan.run.extend(config.cloned());
    let mut named = false;
    for (name, value) in &options.words {
        let at = Place::CommandLine;
        match find(name).map(|option| option.support) {
            Some(Support::Run) if name == "config" => continue,
            Some(Support::Run) => {
                planner.plan.run.push((name.clone(), value.clone()));
                continue;
            }
            _ if name == "name" && value == "global" => {
                planner.finish(open.take(), &at)?;
                named = false;
                continue;
            }
            _ => {}
        }
        if name == "name" && named {
            planner.finish(open.take(), &at)?;
        }
        named |= name == "name";
        let is_global = !named && !options.files.is_empty();
        if is_global {
            planner.set_global(name, value, &at)?;
            continue;
        }
        let job = open.get_or_insert_with(|| planner.global.clone());
        set(job, name, value, &at)?;
    }
    // Options of the command line are defaults of what the files say.
    let job = open.take();
    for path in &options.files {
        let text = lookup.file(path).map_err(|reason| PlanError { place: Place::CommandLine, reason })?;
        planner.file(path, &text, 0)?;
        planner.end_section(&Place::CommandLine)?;
    }
    planner.finish(job, &Place::CommandLine)?;
    if let Some(missing) = planner.sections.iter().find(|name| !planner.has_section(name)) {
        let reason = format!("--section={missing}: no job file has such a section");
        return Err(PlanError { place: Place::CommandLine, reason });
    }
    planner.plan.words = words.to_vec();
    Ok(planner.plan)
}

/// A command line's options, and the files among them.
struct Words {
    words: Vec<(String, String)>,
    files: Vec<String>,
}

/// `--name=value`, `--name value`, `--name` and files.
fn split(words: &[String]) -> Result<Words, PlanError> {
    let fail = |reason: String| PlanError { place: Place::CommandLine, reason };
    let mut out = Words { words: Vec::new(), files: Vec::new() };
    let mut rest = words.iter().peekable();
    while let Some(word) = rest.next() {
        let Some(body) = word.strip_prefix("--").or_else(|| short(word)) else {
            if word.starts_with('-') && word.len() > 1 {
                return Err(fail(format!("{word} is no option; options are written --name=value")));
            }
            out.files.push(word.clone());
            continue;
        };
        let (name, value) = match body.split_once('=') {
            Some((name, value)) => (name, Some(value.to_string())),
            None => (body, None),
        };
        let name = name.replace('-', "_");
        let option = find(&name).ok_or_else(|| fail(unknown(&name)))?;
        let value = match value {
            Some(value) => value,
            None if option.switch => "1".to_string(),
            None => match rest.next_if(|next| !next.starts_with("--")) {
                Some(next) => next.clone(),
                None => return Err(fail(format!("--{name} needs a value: --{name}={}", option.value))),
            },
        };
        out.words.push((option.name.to_string(), value));
    }
    Ok(out)
}

/// The one-letter options that the program has had before fio's.
fn short(word: &str) -> Option<&str> {
    match word {
        "-c" => Some("config"),
        "-o" => Some("output"),
        _ => None,
    }
}

fn unknown(name: &str) -> String {
    match options::nearest(name) {
        Some(near) => format!("{name} is no option; did you mean {near}?"),
        None => format!("{name} is no option; `ringbolt perf --cmdhelp` lists them"),
    }
}

/// One option of one job.
fn set(job: &mut Job, name: &str, value: &str, place: &Place) -> Result<(), PlanError> {
    let fail = |reason: String| PlanError { place: place.clone(), reason };
    let option = find(name).ok_or_else(|| fail(unknown(name)))?;
    match option.support {
        Support::Refused(why) => Err(fail(format!("{name} is not supported: {why}"))),
        Support::Run => Err(fail(format!("{name} belongs on the command line, not to a job"))),
        Support::Job(apply) => {
            apply(job, value).map_err(|reason| fail(format!("--{name}={value}: {reason}")))?;
            job.options.retain(|(known, _)| known != option.name);
            job.options.push((option.name.to_string(), value.to_string()));
            Ok(())
        }
    }
}

impl Planner<'_> {
    fn set_global(&mut self, name: &str, value: &str, place: &Place) -> Result<(), PlanError> {
        set(&mut self.global, name, value, place)?;
        let written = std::mem::take(&mut self.global.options);
        for (name, value) in written {
            self.plan.globals.retain(|(known, _)| *known != name);
            self.plan.globals.push((name, value));
        }
        Ok(())
    }

    fn file(&mut self, path: &str, text: &str, depth: usize) -> Result<(), PlanError> {
        for (index, line) in text.lines().enumerate() {
            let place = Place::File { path: path.to_string(), line: index + 1 };
            self.lines += 1;
            if self.lines > LINES_MAX {
                return Err(PlanError {
                    place,
                    reason: format!("job files have more than {LINES_MAX} lines"),
                });
            }
            self.line(line.trim(), path, &place, depth)?;
        }
        Ok(())
    }

    fn line(&mut self, line: &str, path: &str, place: &Place, depth: usize) -> Result<(), PlanError> {
        let fail = |reason: String| Err(PlanError { place: place.clone(), reason });
        if line.is_empty() || line.starts_with([';', '#']) {
            return Ok(());
        }
        if let Some(rest) = line.strip_prefix('[') {
            let Some((name, after)) = rest.split_once(']') else {
                return fail(format!("{line} begins a section and has no closing bracket"));
            };
            if !matches!(after.trim_start().chars().next(), None | Some(';' | '#')) {
                return fail(format!("{after} follows the section's name"));
            }
            return self.section(name.trim(), place);
        }
        let line = self.substitute(line, place)?;
        if let Some(name) = line.strip_prefix("include").filter(|rest| rest.starts_with([' ', '\t'])) {
            if depth + 1 >= DEPTH_MAX {
                return fail(format!("files are included more than {DEPTH_MAX} deep"));
            }
            let included = beside(path, name.trim());
            let unread = |reason| PlanError { place: place.clone(), reason };
            let text = self.lookup.file(&included).map_err(unread)?;
            return self.file(&included, &text, depth + 1);
        }
        let (name, value) = match line.split_once('=') {
            Some((name, value)) => (name.trim(), value.trim()),
            None => (line.trim(), ""),
        };
        let name = name.replace('-', "_");
        let Some(option) = find(&name) else { return fail(unknown(&name)) };
        let value = match value {
            "" if option.switch => "1",
            "" if !line.contains('=') => {
                return fail(format!("{name} needs a value: {name}={}", option.value));
            }
            value => value,
        };
        match &mut self.current {
            Some(job) => set(job, option.name, value, place),
            None => self.set_global(option.name, value, place),
        }
    }

    fn section(&mut self, name: &str, place: &Place) -> Result<(), PlanError> {
        self.end_section(place)?;
        if name == "global" {
            return Ok(());
        }
        if name.is_empty() {
            return Err(PlanError { place: place.clone(), reason: "a section needs a name".to_string() });
        }
        let mut job = self.global.clone();
        job.spec.name = name.to_string();
        self.current = Some(job);
        Ok(())
    }

    fn end_section(&mut self, place: &Place) -> Result<(), PlanError> {
        let job = self.current.take();
        let wanted = |job: &Job| self.sections.is_empty() || self.sections.contains(&job.spec.name);
        let job = job.filter(wanted);
        self.finish(job, place)
    }

    fn finish(&mut self, job: Option<Job>, place: &Place) -> Result<(), PlanError> {
        let Some(mut job) = job else { return Ok(()) };
        if self.plan.jobs.len() >= JOBS_MAX {
            let reason = format!("there are more than {JOBS_MAX} jobs; numjobs makes many of one");
            return Err(PlanError { place: place.clone(), reason });
        }
        job.has_bdevs = self.plan.run_option("config").is_some();
        job.settle().map_err(|reason| PlanError { place: place.clone(), reason })?;
        self.plan.jobs.push(job);
        Ok(())
    }

    fn has_section(&self, name: &str) -> bool {
        self.plan.jobs.iter().any(|job| job.spec.name == name)
    }

    /// `${NAME}` by the environment, `$ncpus`, `$pagesize` and `$mb_memory` are fio's and not taken.
    fn substitute(&self, line: &str, place: &Place) -> Result<String, PlanError> {
        let mut out = String::with_capacity(line.len());
        let mut rest = line;
        while let Some((before, after)) = rest.split_once("${") {
            out.push_str(before);
            let fail = |reason: String| PlanError { place: place.clone(), reason };
            let (name, after) =
                after.split_once('}').ok_or_else(|| fail("${ is not closed by }".to_string()))?;
            let value = self.lookup.variable(name);
            out.push_str(&value.ok_or_else(|| fail(format!("the environment has no variable {name}")))?);
            rest = after;
        }
        out.push_str(rest);
        Ok(out)
    }
}

/// A path as the file that names it means it.
fn beside(path: &str, name: &str) -> String {
    match path.rsplit_once('/') {
        Some((directory, _)) if !name.starts_with('/') => format!("{directory}/{name}"),
        _ => name.to_string(),
    }
}

#[cfg(test)]
mod tests;

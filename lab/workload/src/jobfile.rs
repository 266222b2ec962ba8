//! Parses fio's job files and command-line options.
//!
//! [`plan`] parses a command line into a [`JobPlan`]; it reads the job files that the command line names, and
//! environment variables, through the caller's [`Lookup`], so that the parser does no I/O itself. It supports
//! sections, `[global]`, `include`, comments, `${VARIABLES}` and the options of [`OPTIONS`]. Anything else is a
//! [`JobPlanError`] with option, file and line: no option is ignored silently. Options of fio that change no result
//! here are accepted with a warning ([`JobPlan::warnings`]).
//!
//! ```
//! use workload::jobfile::{Lookup, plan};
//! struct NoFiles;
//! impl Lookup for NoFiles {
//!     fn file(&self, path: &str) -> Result<String, String> { Err(format!("{path}: no such file")) }
//!     fn variable(&self, _: &str) -> Option<String> { None }
//! }
//! let words = ["--name=a", "--rw=randread", "--bs=8k", "--iodepth=4"].map(String::from);
//! let plan = plan(&words, &NoFiles).unwrap();
//! assert_eq!((plan.jobs.len(), plan.jobs[0].spec.block_bytes), (1, 8192));
//! ```

use std::fmt;

use crate::job_groups::JobGroups;

mod arithmetic;
mod job;
mod options;
mod transport_id;
mod values;

pub use job::{EngineName, ExitScope, FadviseHint, LogPaths, PerfJob};
pub use options::{OPTIONS, OptionInfo, Support, engine_names, engine_options};

use options::find;

/// How the parser reads files and environment variables.
pub trait Lookup {
    /// Reads a job file; an error is a message for the user.
    fn file(&self, path: &str) -> Result<String, String>;
    /// The value of an environment variable.
    fn variable(&self, name: &str) -> Option<String>;
    /// The number that one of fio's [`KEYWORDS`] stands for on this machine.
    fn keyword(&self, _name: &str) -> Option<u64> {
        None
    }
}

/// What fio replaces in job files: the size of a page in bytes, the memory in MiB, and the number of CPUs.
pub const KEYWORDS: [&str; 3] = ["$pagesize", "$mb_memory", "$ncpus"];

/// Where an option is given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OptionLocation {
    /// On the command line.
    CommandLine,
    /// In a job file.
    File {
        /// Path of the file.
        path: String,
        /// Line number, from 1.
        line: usize,
    },
}

impl fmt::Display for OptionLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OptionLocation::CommandLine => write!(f, "command line"),
            OptionLocation::File { path, line } => write!(f, "{path}:{line}"),
        }
    }
}

/// A parse error and its location.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobPlanError {
    /// Where the error is.
    pub location: OptionLocation,
    /// What is wrong, with a hint at what is valid.
    pub reason: String,
}

impl fmt::Display for JobPlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.location {
            OptionLocation::CommandLine => write!(f, "{}", self.reason),
            OptionLocation::File { .. } => write!(f, "{}: {}", self.location, self.reason),
        }
    }
}

impl std::error::Error for JobPlanError {}

/// The parsed command line: jobs and options of the run.
#[derive(Clone, Debug, Default)]
pub struct JobPlan {
    /// The jobs, in order.
    pub jobs: Vec<PerfJob>,
    /// Options of all jobs, as written: those of `[global]` and those before the first `--name`.
    pub globals: Vec<(String, String)>,
    /// Options of the run, not of a job: `output`, `eta` and others.
    pub run: Vec<(String, String)>,
    /// The arguments of the command line, from which each job's process parses the same plan.
    pub words: Vec<String>,
    /// Path and text of each file that was read, once. A job's process gets them: a pipe cannot be read
    /// again, and a file may have changed.
    pub files: Vec<(String, String)>,
    /// One line for each option that is accepted and has no effect.
    pub warnings: Vec<String>,
    /// The options that have a warning.
    warned: Vec<&'static str>,
}

impl JobPlan {
    /// The value of an option of the run; the last one wins.
    pub fn run_option(&self, name: &str) -> Option<&str> {
        self.run.iter().rev().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }
}

impl JobPlan {
    /// Accepts an option without effect, with one warning however often it is given.
    fn warn(&mut self, name: &str, value: &str, location: &OptionLocation) -> Result<(), JobPlanError> {
        let Some(option) = find(name) else { return Ok(()) };
        let Support::NoEffect { values, why } = option.support else { return Ok(()) };
        if !values.is_empty() && !values.contains(&value) {
            let reason = format!("--{name}={value} is not supported: {why}");
            return Err(JobPlanError { location: location.clone(), reason });
        }
        if !self.warned.contains(&option.name) {
            self.warned.push(option.name);
            self.warnings.push(format!("{location}: {name}={value} has no effect: {why}"));
        }
        Ok(())
    }

    /// Warns of each `rate_process` of jobs that have no rate, which fio accepts. In `[global]` it is for the jobs that
    /// have one.
    fn warn_about_closed_loops(&mut self) {
        let why = "without rate or rate_iops no arrivals are scheduled";
        let is_process = |(name, _): &&(String, String)| name == "rate_process";
        for job in self.jobs.iter().filter(|job| job.spec.rates.is_closed_loop()) {
            if let Some((name, value)) = job.options.iter().find(is_process) {
                self.warnings.push(format!("job {}: {name}={value} has no effect: {why}", job.spec.name));
            }
        }
        let is_closed = self.jobs.iter().all(|job| job.spec.rates.is_closed_loop());
        if let Some((name, value)) = self.globals.iter().find(is_process).filter(|_| is_closed) {
            self.warnings.push(format!("[global]: {name}={value} has no effect: {why}"));
        }
    }

    /// Warns of each `bs=A-B`, which is no range in fio.
    fn warn_about_dashes(&mut self) {
        let is_dashed = |(name, value): &&(String, String)| {
            ["bs", "blocksize"].contains(&name.as_str()) && value.contains('-')
        };
        let warning = |place: &str, (name, value): &(String, String)| {
            let pair = value.replacen('-', ",", 1);
            format!(
                "{place}: {name}={value} is {name}={pair}, as in fio: reads and writes; bsrange is a range"
            )
        };
        let mut warnings: Vec<String> =
            self.globals.iter().filter(is_dashed).map(|option| warning("[global]", option)).collect();
        for job in &self.jobs {
            let place = format!("job {}", job.spec.name);
            warnings.extend(job.options.iter().filter(is_dashed).map(|option| warning(&place, option)));
        }
        self.warnings.extend(warnings);
    }

    /// The steady state of a reporting group is that of all its jobs.
    fn check_groups(&self) -> Result<(), JobPlanError> {
        let groups = JobGroups::new(&self.jobs);
        for (index, job) in self.jobs.iter().enumerate().filter(|(_, job)| job.group_reporting) {
            let first = self.jobs.iter().enumerate().find(|(other, _)| groups.of(*other) == groups.of(index));
            if first.is_some_and(|(_, first)| first.spec.steady != job.spec.steady) {
                let reason = format!(
                    "{}: the options of steadystate are the same for all jobs of a group with group_reporting",
                    job.spec.name
                );
                return Err(JobPlanError { location: OptionLocation::CommandLine, reason });
            }
        }
        Ok(())
    }

    /// The configuration file that a job file names. All jobs of a run have one set of bdevs.
    fn set_config(&mut self, path: &str, location: &OptionLocation) -> Result<(), JobPlanError> {
        match self.run_option("config") {
            Some(other) if other != path => {
                let reason = format!("{path}: the run has the configuration file {other} already");
                Err(JobPlanError { location: location.clone(), reason })
            }
            Some(_) => Ok(()),
            None => {
                self.run.push(("config".to_string(), path.to_string()));
                Ok(())
            }
        }
    }
}

/// Depth of nested includes, which also stops a file that includes itself.
const INCLUDE_DEPTH_MAX: usize = 16;
/// Jobs, without the copies of `numjobs`.
const JOBS_MAX: usize = 4096;
/// Lines of all files together.
const LINES_MAX: usize = 1 << 20;

/// The state of the parser.
struct JobFileParser<'a> {
    lookup: &'a dyn Lookup,
    plan: JobPlan,
    global: PerfJob,
    /// The job of the current section; `None` in `[global]`.
    section: Option<PerfJob>,
    /// The sections to run; empty for all.
    sections: Vec<String>,
    lines: usize,
}

/// Parses a command line, without the program's name. As in fio, options before the first `--name` apply to
/// all jobs, and each `--name` starts a job. Without `--name` and job files they are the options of one job.
pub fn plan(words: &[String], lookup: &dyn Lookup) -> Result<JobPlan, JobPlanError> {
    let mut parser = JobFileParser {
        lookup,
        plan: JobPlan::default(),
        global: PerfJob::default(),
        section: None,
        sections: Vec::new(),
        lines: 0,
    };
    let command_line = split_command_line(words)?;
    parser.sections = command_line
        .options
        .iter()
        .filter(|(name, _)| name == "section")
        .map(|(_, value)| value.clone())
        .collect();
    let mut current_job: Option<PerfJob> = None;
    let config = command_line.options.iter().filter(|(name, _)| name == "config");
    parser.plan.run.extend(config.cloned());
    let (mut has_name, mut in_global) = (false, false);
    let begins_job = |(name, value): &(String, String)| name == "name" && value != "global";
    let has_jobs = !command_line.files.is_empty() || command_line.options.iter().any(begins_job);
    for (name, value) in &command_line.options {
        let location = OptionLocation::CommandLine;
        match find(name).map(|option| option.support) {
            Some(Support::Run) if name == "config" => continue,
            Some(Support::Run) => {
                parser.plan.run.push((name.clone(), value.clone()));
                continue;
            }
            Some(Support::NoEffect { .. }) => {
                parser.plan.warn(name, value, &location)?;
                continue;
            }
            _ if name == "name" && value == "global" => {
                parser.finish(current_job.take(), &location)?;
                (has_name, in_global) = (false, true);
                continue;
            }
            _ => {}
        }
        if name == "name" && has_name {
            parser.finish(current_job.take(), &location)?;
        }
        has_name |= name == "name";
        in_global &= !has_name;
        let is_global = in_global || (!has_name && has_jobs);
        if is_global {
            parser.set_global(name, value, &location)?;
            continue;
        }
        let job = current_job.get_or_insert_with(|| parser.global.clone());
        set(job, name, value, &location)?;
    }
    // Options of the command line are defaults for the job files.
    let job = current_job.take();
    for path in &command_line.files {
        let text = parser
            .read(path)
            .map_err(|reason| JobPlanError { location: OptionLocation::CommandLine, reason })?;
        parser.parse_file(path, &text, 0)?;
        parser.end_section(&OptionLocation::CommandLine)?;
    }
    parser.finish(job, &OptionLocation::CommandLine)?;
    if let Some(missing) = parser.sections.iter().find(|name| !parser.has_section(name)) {
        let reason = format!("--section={missing}: no job file has such a section");
        return Err(JobPlanError { location: OptionLocation::CommandLine, reason });
    }
    parser.plan.check_groups()?;
    parser.plan.warn_about_closed_loops();
    parser.plan.warn_about_dashes();
    parser.plan.words = words.to_vec();
    Ok(parser.plan)
}

/// The options and job files of a command line.
struct CommandLine {
    options: Vec<(String, String)>,
    files: Vec<String>,
}

/// Splits arguments into `--name=value`, `--name value`, `--name` and job files. One dash is as good as two, as in fio.
fn split_command_line(words: &[String]) -> Result<CommandLine, JobPlanError> {
    let fail = |reason: String| JobPlanError { location: OptionLocation::CommandLine, reason };
    let mut out = CommandLine { options: Vec::new(), files: Vec::new() };
    let mut rest = words.iter().peekable();
    while let Some(word) = rest.next() {
        let Some(body) = short_option(word).or_else(|| option_body(word)) else {
            out.files.push(word.clone());
            continue;
        };
        let (name, value) = match body.split_once('=') {
            Some((name, value)) => (name, Some(value.to_string())),
            None => (body, None),
        };
        let name = name.replace('-', "_");
        let option = find(&name).ok_or_else(|| fail(unknown_option(&name)))?;
        let value = match value {
            Some(value) => value,
            // fio wants the value of `--direct 1`, which would be a job file here.
            None if option.switch => rest
                .next_if(|next| ["0", "1"].contains(&next.as_str()))
                .map_or("1".to_string(), String::clone),
            None if option.value == "NAME" && option.name.ends_with("_log") => String::new(),
            None => match rest.next_if(|next| !is_option(next)) {
                Some(next) => next.clone(),
                None => return Err(fail(format!("--{name} needs a value: --{name}={}", option.value))),
            },
        };
        out.options.push((option.name.to_string(), value));
    }
    Ok(out)
}

/// An argument without its dashes; `None` for a job file. `-` is standard input.
fn option_body(word: &str) -> Option<&str> {
    word.strip_prefix("--").or_else(|| word.strip_prefix('-').filter(|body| !body.is_empty()))
}

/// Whether an argument is an option. A value may begin with one dash.
fn is_option(word: &str) -> bool {
    let name = |body: &str| body.split('=').next().unwrap_or_default().replace('-', "_");
    word.starts_with("--") || option_body(word).is_some_and(|body| find(&name(body)).is_some())
}

/// The long name of a one-letter option; fio has none of these.
fn short_option(word: &str) -> Option<&str> {
    match word {
        "-c" => Some("config"),
        "-o" => Some("output"),
        _ => None,
    }
}

/// The option of a name or an alias.
///
/// # Errors
/// There is none; the message says which one was probably meant.
pub fn option(name: &str) -> Result<&'static OptionInfo, String> {
    let name = name.replace('-', "_");
    find(&name).ok_or_else(|| unknown_option(&name))
}

fn unknown_option(name: &str) -> String {
    match options::nearest(name) {
        Some(near) => format!("{name} is no option; did you mean {near}?"),
        None => format!("{name} is no option; `ringbolt perf --cmdhelp` lists them"),
    }
}

/// Applies an option to a job.
fn set(job: &mut PerfJob, name: &str, value: &str, location: &OptionLocation) -> Result<(), JobPlanError> {
    let fail = |reason: String| JobPlanError { location: location.clone(), reason };
    let option = find(name).ok_or_else(|| fail(unknown_option(name)))?;
    match option.support {
        Support::Refused(why) => Err(fail(format!("{name} is not supported: {why}"))),
        Support::Run => Err(fail(format!("{name} belongs on the command line, not to a job"))),
        Support::NoEffect { .. } => Ok(()),
        Support::PerfJob(apply) => {
            apply(job, value).map_err(|reason| fail(format!("--{name}={value}: {reason}")))?;
            job.options.retain(|(known, _)| known != option.name);
            job.options.push((option.name.to_string(), value.to_string()));
            Ok(())
        }
    }
}

impl JobFileParser<'_> {
    /// The text of a file, which is read once.
    fn read(&mut self, path: &str) -> Result<String, String> {
        if let Some((_, text)) = self.plan.files.iter().find(|(known, _)| known == path) {
            return Ok(text.clone());
        }
        let text = self.lookup.file(path)?;
        self.plan.files.push((path.to_string(), text.clone()));
        Ok(text)
    }

    fn set_global(&mut self, name: &str, value: &str, location: &OptionLocation) -> Result<(), JobPlanError> {
        set(&mut self.global, name, value, location)?;
        let written = std::mem::take(&mut self.global.options);
        for (name, value) in written {
            self.plan.globals.retain(|(known, _)| *known != name);
            self.plan.globals.push((name, value));
        }
        Ok(())
    }

    fn parse_file(&mut self, path: &str, text: &str, depth: usize) -> Result<(), JobPlanError> {
        for (index, line) in text.lines().enumerate() {
            let location = OptionLocation::File { path: path.to_string(), line: index + 1 };
            self.lines += 1;
            if self.lines > LINES_MAX {
                return Err(JobPlanError {
                    location,
                    reason: format!("job files have more than {LINES_MAX} lines"),
                });
            }
            self.parse_line(line.trim(), path, &location, depth)?;
        }
        Ok(())
    }

    fn parse_line(
        &mut self,
        line: &str,
        path: &str,
        location: &OptionLocation,
        depth: usize,
    ) -> Result<(), JobPlanError> {
        let fail = |reason: String| Err(JobPlanError { location: location.clone(), reason });
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
            return self.start_section(name.trim(), location);
        }
        // A comment begins anywhere in a line, as in fio.
        let line = line.split([';', '#']).next().unwrap_or_default().trim_end();
        let line = self.substitute(line, location)?;
        if let Some(name) = line.strip_prefix("include").filter(|rest| rest.starts_with([' ', '\t'])) {
            if depth + 1 >= INCLUDE_DEPTH_MAX {
                return fail(format!("files are included more than {INCLUDE_DEPTH_MAX} deep"));
            }
            let included = relative_to(path, name.trim());
            let unread = |reason| JobPlanError { location: location.clone(), reason };
            let text = self.read(&included).map_err(unread)?;
            return self.parse_file(&included, &text, depth + 1);
        }
        let (name, value) = match line.split_once('=') {
            Some((name, value)) => (name.trim(), value.trim()),
            None => (line.trim(), ""),
        };
        let name = name.replace('-', "_");
        let Some(option) = find(&name) else { return fail(unknown_option(&name)) };
        let value = match value {
            "" if option.switch => "1",
            // A log without a name has the job's.
            "" if option.value == "NAME" && option.name.ends_with("_log") => "",
            "" if !line.contains('=') => {
                return fail(format!("{name} needs a value: {name}={}", option.value));
            }
            value => value,
        };
        match option.support {
            // Sections that were not selected may say anything of the run.
            Support::NoEffect { .. } if !self.is_selected() => return Ok(()),
            Support::Run if option.name == "config" && !self.is_selected() => return Ok(()),
            Support::NoEffect { .. } => return self.plan.warn(&name, value, location),
            Support::Run if option.name == "config" => return self.plan.set_config(value, location),
            _ => {}
        }
        match &mut self.section {
            Some(job) => set(job, option.name, value, location),
            None => self.set_global(option.name, value, location),
        }
    }

    fn start_section(&mut self, name: &str, location: &OptionLocation) -> Result<(), JobPlanError> {
        self.end_section(location)?;
        if name == "global" {
            return Ok(());
        }
        if name.is_empty() {
            return Err(JobPlanError {
                location: location.clone(),
                reason: "a section needs a name".to_string(),
            });
        }
        let mut job = self.global.clone();
        job.spec.name = name.to_string();
        self.section = Some(job);
        Ok(())
    }

    fn end_section(&mut self, location: &OptionLocation) -> Result<(), JobPlanError> {
        let is_selected = self.is_selected();
        let job = self.section.take().filter(|_| is_selected);
        self.finish(job, location)
    }

    /// Whether the current section is one of those that run, or none of a job.
    fn is_selected(&self) -> bool {
        let is_named = |job: &PerfJob| self.sections.contains(&job.spec.name);
        self.sections.is_empty() || self.section.as_ref().is_none_or(is_named)
    }

    fn finish(&mut self, job: Option<PerfJob>, location: &OptionLocation) -> Result<(), JobPlanError> {
        let Some(mut job) = job else { return Ok(()) };
        if self.plan.jobs.len() >= JOBS_MAX {
            let reason = format!("there are more than {JOBS_MAX} jobs; numjobs makes many of one");
            return Err(JobPlanError { location: location.clone(), reason });
        }
        job.has_bdevs = self.plan.run_option("config").is_some();
        job.finalize()
            .and_then(|()| job.resolve_wait_for(&self.plan.jobs))
            .map_err(|reason| JobPlanError { location: location.clone(), reason })?;
        self.plan.jobs.push(job);
        Ok(())
    }

    fn has_section(&self, name: &str) -> bool {
        self.plan.jobs.iter().any(|job| job.spec.name == name)
    }

    /// Replaces `${NAME}` by environment variables, and [`KEYWORDS`] by numbers of the machine.
    fn substitute(&self, line: &str, location: &OptionLocation) -> Result<String, JobPlanError> {
        let mut out = String::with_capacity(line.len());
        let mut rest = line;
        while let Some((before, after)) = rest.split_once("${") {
            out.push_str(before);
            let fail = |reason: String| JobPlanError { location: location.clone(), reason };
            let (name, after) =
                after.split_once('}').ok_or_else(|| fail("${ is not closed by }".to_string()))?;
            let value = self.lookup.variable(name);
            out.push_str(&value.ok_or_else(|| fail(format!("the environment has no variable {name}")))?);
            rest = after;
        }
        out.push_str(rest);
        for keyword in KEYWORDS.into_iter().filter(|_| line.contains('$')) {
            if let Some(number) = self.lookup.keyword(keyword).filter(|_| out.contains(keyword)) {
                out = out.replace(keyword, &number.to_string());
            }
        }
        Ok(out)
    }
}

/// Resolves an included path relative to the directory of the file that includes it.
fn relative_to(path: &str, name: &str) -> String {
    match path.rsplit_once('/') {
        Some((directory, _)) if !name.starts_with('/') => format!("{directory}/{name}"),
        _ => name.to_string(),
    }
}

#[cfg(test)]
pub(crate) mod tests;

//! Tests of the whole page: its content, valid HTML, escaping of untrusted text, and rendering in a browser.
#![allow(clippy::unwrap_used)]

mod browser;
mod synthetic;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;

use html5ever::tendril::TendrilSink as _;
use lab_experiments::{CellRecord, ParameterValue, PlannedDevice, RunDirectory, RunWriter};
use markup5ever_rcdom::{Handle, NodeData, RcDom};

/// Parses like a browser and returns the parse errors, which a browser would silently correct.
fn parse(page: &str) -> (RcDom, Vec<String>) {
    let dom = html5ever::parse_document(RcDom::default(), Default::default()).one(page);
    let errors = dom.errors.borrow().iter().map(ToString::to_string).collect();
    (dom, errors)
}

fn walk(node: &Handle, visit: &mut impl FnMut(&Handle)) {
    visit(node);
    for child in node.children.borrow().iter() {
        walk(child, visit);
    }
}

fn elements(dom: &RcDom, name: &str) -> Vec<Handle> {
    let mut found = Vec::new();
    walk(&dom.document, &mut |node| {
        if let NodeData::Element { name: tag, .. } = &node.data
            && &*tag.local == name
        {
            found.push(node.clone());
        }
    });
    found
}

fn text_of(node: &Handle) -> String {
    let mut text = String::new();
    walk(node, &mut |node| {
        if let NodeData::Text { contents } = &node.data {
            text.push_str(&contents.borrow());
        }
    });
    text
}

fn attribute(node: &Handle, wanted: &str) -> Option<String> {
    let NodeData::Element { attrs, .. } = &node.data else { return None };
    attrs.borrow().iter().find(|attribute| &*attribute.name.local == wanted).map(|a| a.value.to_string())
}

#[test]
fn a_page_is_valid_html_with_all_sections() {
    let run = synthetic::run(1300, 2);
    let page = lab_report::page::render_html(&run).unwrap();
    let (dom, errors) = parse(&page);
    assert!(errors.is_empty(), "{errors:?}");
    let charts =
        elements(&dom, "svg").into_iter().filter(|svg| attribute(svg, "class").as_deref() == Some("chart"));
    let charts: Vec<Handle> = charts.collect();
    assert!(charts.len() > 80, "only {} charts", charts.len());
    for chart in &charts {
        assert!(!chart.children.borrow().is_empty());
    }
    let text = text_of(&dom.document);
    for wanted in [
        "What to use",
        "echo none > /sys/block/nvme0n1/queue/scheduler",
        "O-23",
        "KF-5",
        "no NVMe device is bound to vfio-pci",
        "Turbo is on",
        "Where the papers disagree",
        "Example CPU 4 GHz",
        "ringbolt lab run all",
    ] {
        assert!(text.contains(wanted), "{wanted:?} is not in the page");
    }
    // The 28 findings of ICPE'24, four of CHEOPS'23 and five claims of SPDK, each with a verdict.
    let findings = elements(&dom, "details");
    let findings = findings.iter().filter(|node| attribute(node, "class").as_deref() == Some("finding"));
    assert_eq!(findings.count(), 37);
    let data = elements(&dom, "script")
        .into_iter()
        .find(|node| attribute(node, "id").as_deref() == Some("data"))
        .unwrap();
    let data: serde_json::Value = serde_json::from_str(&text_of(&data)).unwrap();
    assert_eq!(data["records"].as_array().unwrap().len(), run.records.len());
}

#[test]
fn every_link_targets_an_element_of_the_page() {
    let (dom, _) = parse(&lab_report::page::render_html(&synthetic::run(300, 1)).unwrap());
    let mut names = Vec::new();
    walk(&dom.document, &mut |node| names.extend(attribute(node, "id")));
    let mut links = 0;
    walk(&dom.document, &mut |node| {
        for name in ["href", "src"] {
            let Some(link) = attribute(node, name) else { continue };
            let inside = link.strip_prefix('#').is_some_and(|name| names.iter().any(|known| known == name));
            assert!(inside || link == "data:,", "{link}");
            links += 1;
        }
    });
    assert!(links > 20);
}

#[test]
fn untrusted_text_is_escaped() {
    const EVIL: &str = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{ 7*7 }}";
    let mut run = synthetic::run(60, 1);
    let mut record = CellRecord::new(EVIL, EVIL);
    record.parameters.insert(EVIL.into(), ParameterValue::from(EVIL));
    record.parameters.insert("scheduler".into(), ParameterValue::from(EVIL));
    record.parameters.insert("iodepth".into(), ParameterValue::from(4));
    record.role_mut("fg").set("iops", 5.0);
    record.role_mut("fg").set(EVIL, 5.0);
    record.commands = vec![EVIL.into()];
    record.job_file = EVIL.into();
    record.notes = vec![EVIL.into()];
    run.records.push(record);
    let mut skipped = CellRecord::new("own.skipped", EVIL);
    skipped.skipped = Some(EVIL.into());
    run.records.push(skipped);
    run.machine.distortions.push(EVIL.into());
    run.machine.facts = serde_json::json!({ EVIL: { EVIL: EVIL } });
    run.plan.targets.push(PlannedDevice {
        kind: "block".into(),
        path: format!("/dev/{EVIL}"),
        described: EVIL.into(),
        ..PlannedDevice::default()
    });
    run.plan.experiments[0].scaled.push(EVIL.into());
    run.dropped.push(EVIL.into());
    let page = lab_report::page::render_html(&run).unwrap();
    let (dom, errors) = parse(&page);
    assert!(errors.is_empty(), "{errors:?}");
    assert!(elements(&dom, "img").is_empty());
    assert_eq!(elements(&dom, "script").len(), 2, "the embedded data and the page's own script");
    walk(&dom.document, &mut |node| {
        assert_eq!(attribute(node, "onerror"), None);
    });
    assert!(!page.contains("49}") && page.contains("7*7"), "names are not evaluated as templates");
    // A device name with shell metacharacters does not appear in a command.
    assert!(!page.contains("echo none &gt; /sys/block/&lt;"));
}

#[test]
fn an_empty_run_renders_a_valid_page() {
    let page = lab_report::page::render_html(&RunDirectory::default()).unwrap();
    let (dom, errors) = parse(&page);
    assert!(errors.is_empty(), "{errors:?}");
    assert!(text_of(&dom.document).contains("nothing measured"));
}

fn scratch(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("ringbolt-report-{name}-{}", std::process::id()));
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).unwrap();
    path
}

#[test]
fn an_interrupted_run_is_reported_with_its_complete_records() {
    let directory = scratch("cut");
    let run = synthetic::run(40, 1);
    let mut writer = RunWriter::create(&directory.join("run"), &run.machine, &run.plan).unwrap();
    for record in &run.records[..10] {
        writer.append(record).unwrap();
    }
    let results = directory.join("run/results.jsonl");
    let bytes = fs::read(&results).unwrap();
    fs::write(&results, &bytes[..bytes.len() - 20]).unwrap();
    let read = RunDirectory::open(&directory.join("run")).unwrap();
    let page = lab_report::page::render_html(&read).unwrap();
    assert!(page.contains("Lines of results that could not be read"));
    assert!(page.contains("the run ended before this cell"));
    fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn a_browser_renders_the_page_without_console_messages() {
    let Some(browser) = browser::find() else {
        println!("SKIPPED: no chromium in PATH");
        return;
    };
    let directory = scratch("browser");
    let page = directory.join("report.html");
    fs::write(&page, lab_report::page::render_html(&synthetic::run(700, 2)).unwrap()).unwrap();
    let (document, log) = browser::browse(browser, &directory, &page);
    // Console messages of the page, script errors included, are logged with this tag.
    let messages: Vec<&str> = log.lines().filter(|line| line.contains("CONSOLE")).collect();
    assert!(messages.is_empty(), "{messages:?}");
    let (dom, _) = parse(&document);
    let filter =
        elements(&dom, "p").into_iter().find(|p| attribute(p, "class").as_deref() == Some("filter")).unwrap();
    assert_eq!(attribute(&filter, "hidden"), None, "the script did not run to its end");
    let save = elements(&dom, "button")
        .into_iter()
        .find(|node| attribute(node, "id").as_deref() == Some("save"))
        .unwrap();
    assert_eq!(attribute(&save, "hidden"), None);
    let charts = elements(&dom, "svg");
    let drawn = charts.iter().filter(|svg| {
        let mut shapes = 0;
        walk(svg, &mut |node| shapes += usize::from(matches!(&node.data, NodeData::Element { name, .. } if matches!(&*name.local, "path" | "rect"))));
        shapes > 0
    });
    assert_eq!(drawn.count(), charts.len());
    assert!(charts.len() > 40);
    fs::remove_dir_all(&directory).unwrap();
}

/// The colour class of each series in each chart, by series name without the mark of published values.
fn series_colours(dom: &RcDom) -> BTreeMap<String, BTreeSet<String>> {
    let mut colours: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    walk(&dom.document, &mut |node| {
        let Some(name) = attribute(node, "data-s") else { return };
        let class = attribute(node, "class").unwrap();
        let colour = class.split(' ').find(|word| word.starts_with('c')).unwrap();
        let name = name.trim_end_matches(" · publ.").to_string();
        colours.entry(name).or_default().insert(colour.to_string());
    });
    colours
}

#[test]
fn a_stack_or_scheduler_has_one_colour_on_the_whole_page() {
    let (dom, _) = parse(&lab_report::page::render_html(&synthetic::run(1300, 1)).unwrap());
    let colours = series_colours(&dom);
    for names in [["none", "bfq", "kyber", "mq-deadline"], ["psync", "iou", "spdk", "spdk-perf"]] {
        for name in names {
            assert_eq!(colours.get(name).map(BTreeSet::len), Some(1), "{name}: {:?}", colours.get(name));
        }
    }
    assert_ne!(colours["spdk"], colours["none"]);
}

#[test]
fn figures_that_were_only_published_are_apart() {
    let mut run = synthetic::run(1300, 1);
    for record in run.records.iter_mut().filter(|record| record.experiment == "cheops23.fig2") {
        record.roles.clear();
        record.skipped = Some("no device".into());
    }
    let (dom, _) = parse(&lab_report::page::render_html(&run).unwrap());
    let section = |id: &str| {
        let found =
            elements(&dom, "section").into_iter().find(|node| attribute(node, "id").as_deref() == Some(id));
        let mut experiments = Vec::new();
        walk(&found.unwrap(), &mut |node| {
            if attribute(node, "class").as_deref() == Some("exp") {
                experiments.push((attribute(node, "id").unwrap(), text_of(node)));
            }
        });
        experiments
    };
    let (measured, published) = (section("figures"), section("published"));
    assert!(!measured.is_empty() && !published.is_empty());
    let nothing = |(_, text): &(String, String)| text.contains("0 cells measured: only published values");
    assert!(published.iter().all(nothing) && !measured.iter().any(nothing));
    // A panel without a measurement comes behind all that have one.
    let split =
        measured.iter().filter(|(_, text)| text.contains("Published, without a measurement in this run"));
    assert!(split.count() > 0);
}

#[test]
fn goals_without_a_result_share_a_card() {
    let cards = |run: &RunDirectory| {
        let (dom, _) = parse(&lab_report::page::render_html(run).unwrap());
        let articles = elements(&dom, "article").into_iter();
        articles
            .map(|card| text_of(&card).split_whitespace().collect::<Vec<_>>().join(" "))
            .collect::<Vec<String>>()
    };
    let mut run = synthetic::run(60, 2);
    assert_eq!(cards(&run).len(), 3);
    run.plan.targets[0].kind = "loop".into();
    let all = cards(&run);
    assert_eq!(all.len(), 1, "{all:?}");
    for goal in ["shortest tail latency", "most I/O for each core", "beside busy neighbours"] {
        assert!(all[0].contains(goal), "{all:?}");
    }
    assert_eq!(all[0].matches("ot tested").count(), 1, "{all:?}");
    assert!(all[0].contains(" Measured on page cache"), "{all:?}");
}

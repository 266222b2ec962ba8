//! A headless browser, if one is installed.
#![allow(dead_code)] // Each test file uses a part.

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, mpsc};
use std::thread;

/// The first installed browser; `None` if there is none.
pub(crate) fn find() -> Option<&'static str> {
    let works = |name: &&str| {
        Command::new(name).arg("--version").output().is_ok_and(|output| output.status.success())
    };
    ["chromium", "chromium-browser", "google-chrome"].into_iter().find(works)
}

/// The browser, which ends after five minutes whatever it does.
fn command(browser: &str, directory: &Path) -> Command {
    let mut command = Command::new("timeout");
    command
        .args(["-k", "5", "300", browser, "--headless=new", "--no-sandbox", "--disable-gpu"])
        .args(["--enable-logging=stderr", "--window-size=1500,1000"])
        .arg(format!("--user-data-dir={}", directory.join("profile").display()));
    command
}

/// The document after its script ran, and the browser's log.
pub(crate) fn browse(browser: &str, directory: &Path, page: &Path) -> (String, String) {
    let mut command = command(browser, directory);
    let output = command.arg("--dump-dom").arg(format!("file://{}", page.display())).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    (String::from_utf8_lossy(&output.stdout).into(), String::from_utf8_lossy(&output.stderr).into())
}

/// Serves `pages` by path to a browser, which opens the first, and returns what one of them posts.
pub(crate) fn posted(browser: &str, directory: &Path, pages: &[(&str, String)]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}{}", listener.local_addr().unwrap(), pages[0].0);
    let pages: HashMap<String, String> =
        pages.iter().map(|(path, text)| (path.to_string(), text.clone())).collect();
    let (pages, (sender, results)) = (Arc::new(pages), mpsc::channel());
    let ended = sender.clone();
    // Ends with the process: a browser also opens connections that it never uses.
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let (pages, sender) = (pages.clone(), sender.clone());
            thread::spawn(move || {
                if let Ok(Some(body)) = answer(stream, &pages) {
                    let _ = sender.send(Ok(body));
                }
            });
        }
    });
    let log = directory.join("log");
    let mut command = command(browser, directory);
    // Without a debugging port, a headless browser ends when it has loaded the page.
    command.args(["--remote-debugging-port=0", &url]);
    command.stdout(Stdio::null()).stderr(std::fs::File::create(&log).unwrap());
    let mut child = command.spawn().unwrap();
    let id = child.id();
    let waiter = thread::spawn(move || {
        let status = child.wait();
        let _ = ended.send(Err(format!("the browser ended before it posted: {status:?}")));
    });
    let result = results.recv().unwrap();
    // `timeout` passes the signal on to the browser.
    let _ = Command::new("kill").arg(id.to_string()).status();
    waiter.join().unwrap();
    result.unwrap_or_else(|error| panic!("{error}: {}", std::fs::read_to_string(&log).unwrap_or_default()))
}

/// Answers one request; returns the body of a POST.
fn answer(stream: TcpStream, pages: &HashMap<String, String>) -> std::io::Result<Option<String>> {
    let mut reader = BufReader::new(stream);
    let mut first = String::new();
    reader.read_line(&mut first)?;
    let mut length = 0;
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 || line.trim().is_empty() {
            break;
        }
        if let Some((name, value)) = line.split_once(':')
            && name.eq_ignore_ascii_case("content-length")
        {
            length = value.trim().parse().unwrap_or(0);
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    let mut words = first.split(' ');
    let (method, path) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
    let found = pages.get(path);
    let text = found.map_or("", String::as_str);
    let status = if found.is_some() || method == "POST" { "200 OK" } else { "404 Not Found" };
    let length = text.len();
    let mut stream = reader.into_inner();
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: text/html\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{text}"
    )?;
    stream.flush()?;
    Ok((method == "POST").then(|| String::from_utf8_lossy(&body).into()))
}

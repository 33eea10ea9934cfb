//! Tests with valid and invalid answers of servers, and with the client's reactions to them.

use super::memcached::Memcached;
use super::redis::{Get, MGet, OfBenchmark};
use super::*;
use crate::driver::Tally;
use crate::kv::{Plan, Run};
use crate::workload::key;
use fuzz::{Change, Executions, budget, change};
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixListener;
use std::thread::JoinHandle;

#[path = "../../../crates/remote/tests/support/fuzz.rs"]
mod fuzz;

const VALUE_SIZE: usize = 16;

fn value(number: u64) -> Vec<u8> {
    let mut value = vec![0; VALUE_SIZE];
    fill(number, &mut value);
    value
}

fn run_of(text: &str) -> Run {
    let mut workload = Workload::parse("test", text).expect("a workload");
    workload.records = 8;
    let plan = Plan {
        workload,
        value_size: VALUE_SIZE,
        tasks: 1,
        verify: false,
        by_node: false,
        sampled: 64,
        seed: 3,
    };
    plan.run().expect("a run")
}

/// Starts a server for one connection. Returns the folder of its socket, its address and its thread.
fn served(serve: impl FnOnce(UnixStream) + Send + 'static) -> (tempfile::TempDir, Address, JoinHandle<()>) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("socket");
    let listener = UnixListener::bind(&path).expect("a socket");
    let thread = std::thread::spawn(move || serve(listener.accept().expect("a client").0));
    (folder, Address::Unix(path), thread)
}

/// Runs `count` operations of a client of `D` on the server `serve`.
fn worked<D: Dialect>(
    text: &str,
    shape: Shape,
    count: usize,
    serve: impl FnOnce(UnixStream) + Send + 'static,
) -> (Result<(), String>, Tally) {
    let run = run_of(text);
    let thread = run.thread(0);
    let (_folder, address, server) = served(serve);
    let mut client = Client::<D>::connect(&address, Waiting::Asleep, VALUE_SIZE).expect("a connection");
    let left = Cell::new(count);
    let done = client.work(&thread, shape, || left.replace(left.get().saturating_sub(1)) > 0);
    drop(client);
    server.join().expect("the server ends when its client disconnects");
    (done, thread.take_tally())
}

/// Serves a Redis with GET, MGET, SET and INFO. Reports the name of each command that it receives to `asked`.
fn redis(stream: UnixStream, mut records: HashMap<Vec<u8>, Vec<u8>>, asked: std::sync::mpsc::Sender<String>) {
    let mut reader = BufReader::new(stream.try_clone().expect("a clone"));
    let mut writer = stream;
    let number = |reader: &mut BufReader<UnixStream>, sign: char| -> Option<usize> {
        let mut line = String::new();
        reader.read_line(&mut line).ok().filter(|&read| read > 0)?;
        let digits = line.trim_end().strip_prefix(sign).expect("RESP");
        Some(digits.parse().expect("a number"))
    };
    while let Some(words) = number(&mut reader, '*') {
        let words: Vec<Vec<u8>> = (0..words)
            .map(|_| {
                let mut word = vec![0; number(&mut reader, '$').expect("a word") + 2];
                reader.read_exact(&mut word).expect("a word");
                word.truncate(word.len() - 2);
                word
            })
            .collect();
        let bulk = |value: Option<&Vec<u8>>| match value {
            Some(value) => [format!("${}\r\n", value.len()).as_bytes(), value, b"\r\n"].concat(),
            None => b"$-1\r\n".to_vec(),
        };
        let name = String::from_utf8(words[0].clone()).expect("a name");
        let answer = match &*name {
            "GET" => bulk(records.get(&words[1])),
            "MGET" => {
                let values: Vec<u8> = words[1..].iter().flat_map(|word| bulk(records.get(word))).collect();
                [format!("*{}\r\n", words.len() - 1).as_bytes(), &values].concat()
            }
            "SET" => {
                records.insert(words[1].clone(), words[2].clone());
                b"+OK\r\n".to_vec()
            }
            "INFO" => bulk(Some(&b"# Server\r\nredis_version:7\r\nprocess_id:77\r\n".to_vec())),
            other => format!("-ERR unknown command '{other}'\r\n").into_bytes(),
        };
        asked.send(name).unwrap_or(());
        writer.write_all(&answer).unwrap_or(());
    }
}

fn all_records() -> HashMap<Vec<u8>, Vec<u8>> {
    (0..8).map(|number| (key(number).to_vec(), value(number))).collect()
}

const READS: &str = "readproportion=1\nupdateproportion=0";
const ONE: Shape = Shape { depth: 1, batches: 1 };

#[test]
fn every_operation_is_done_once_in_any_shape() {
    for (depth, batches) in [(1, 1), (1, 4), (5, 2), (64, 1), (64, 4)] {
        let shape = Shape { depth, batches };
        let sizes: Vec<usize> = shape.sizes().collect();
        assert_eq!(sizes.iter().sum::<usize>(), depth as usize, "{shape}");
        assert!(sizes.iter().all(|&size| size > 0), "{shape}");
        for mget in [false, true] {
            let (sender, asked) = std::sync::mpsc::channel();
            let serve = |stream| redis(stream, all_records(), sender);
            let (done, tally) = match mget {
                false => worked::<Get>(READS, shape, 300, serve),
                true => worked::<MGet>(READS, shape, 300, serve),
            };
            assert_eq!(done, Ok(()), "{shape}");
            assert_eq!((tally.operations(), tally.violations), (300, 0), "{shape}: {:?}", tally.failures);
            assert_eq!(tally.latencies.all().count(), 5, "one in {SAMPLED}, starting with the first");
            let name = if mget { "MGET" } else { "GET" };
            assert!(asked.iter().all(|asked| asked == name));
        }
    }
}

#[test]
fn a_read_modify_write_reads_then_writes_and_counts_once() {
    let modifies = "readproportion=0\nupdateproportion=0\nreadmodifywriteproportion=1";
    let (sender, asked) = std::sync::mpsc::channel();
    let shape = Shape { depth: 6, batches: 2 };
    let (done, tally) = worked::<Get>(modifies, shape, 60, |stream| redis(stream, all_records(), sender));
    assert_eq!((done, tally.operations(), tally.violations), (Ok(()), 60, 0));
    let asked: Vec<String> = asked.iter().collect();
    let count = |name: &str| asked.iter().filter(|asked| *asked == name).count();
    assert_eq!((count("GET"), count("SET")), (60, 60));
    assert_eq!(asked[0], "GET");
}

#[test]
fn loaded_records_are_present_and_correct() {
    let (sender, asked) = std::sync::mpsc::channel();
    let (_folder, address, server) = served(|stream| redis(stream, HashMap::new(), sender));
    let mut client = Client::<Get>::connect(&address, Waiting::Awake, VALUE_SIZE).expect("a connection");
    assert_eq!(client.server_pid(), Ok(77));
    let mut loaded = 0;
    assert_eq!(client.load(0..8, || loaded += 1), Ok(()));
    let (run, left) = (run_of(READS), Cell::new(100));
    let thread = run.thread(0);
    let goes_on = || left.replace(left.get() - 1) > 0;
    assert_eq!(client.work(&thread, Shape { depth: 10, batches: 2 }, goes_on), Ok(()));
    let tally = thread.take_tally();
    assert_eq!((loaded, tally.violations), (8, 0), "{:?}", tally.failures);
    drop(client);
    server.join().expect("the server ends");
    assert_eq!(asked.iter().filter(|name| name == "SET").count(), 8);
}

#[test]
fn a_wrong_or_missing_value_is_counted_and_reported() {
    type Spoil = fn(&mut HashMap<Vec<u8>, Vec<u8>>);
    let spoils: [Spoil; 4] = [
        |records| records.clear(),
        |records| records.values_mut().for_each(|value| value[0] ^= 1),
        |records| records.values_mut().for_each(|value| value[VALUE_SIZE - 1] ^= 1),
        |records| records.values_mut().for_each(|value| value.truncate(VALUE_SIZE - 1)),
    ];
    for spoil in spoils {
        let mut records = all_records();
        spoil(&mut records);
        let (sender, _asked) = std::sync::mpsc::channel();
        let (done, tally) = worked::<Get>(READS, ONE, 20, |stream| redis(stream, records, sender));
        assert_eq!((done, tally.operations(), tally.violations), (Ok(()), 20, 20));
        assert!(tally.failures[0].contains("has a wrong value"), "{:?}", tally.failures);
    }
}

/// Returns a server that answers the first request with `answer` and then closes the connection.
fn answering(answer: Vec<u8>) -> impl FnOnce(UnixStream) + Send {
    move |mut stream| {
        let _asked = stream.read(&mut [0; 4096]);
        let _told = stream.write_all(&answer); // The client may close the connection before it has read everything.
    }
}

#[test]
fn an_invalid_answer_is_reported_with_its_start() {
    let endless = vec![b'x'; 100_000];
    let answers: [(&[u8], &str); 12] = [
        (b"", "closed the connection"),
        (b"$16", "closed the connection"),
        (b"$16\r\nabc", "closed the connection"),
        (b"-LOADING Redis is loading\r\n", "'-LOADING Redis is loading'"),
        (b"$1048577\r\n", "a value of 1048577 bytes, more than the limit of"),
        (b"$99999999999999999999999\r\n", "'$99999999999999999999999'"),
        (b"$-2\r\n", "'$-2'"),
        (b"$3\r\nabcd\r\n", "does not end after its 3 bytes"),
        (b"+OK\r\n", "'+OK'"),
        (b"\r\n", "''"),
        (b"\n", "does not end in CRLF"),
        (&endless, "does not end in CRLF"),
    ];
    for (answer, expected) in answers {
        let (done, tally) = worked::<Get>(READS, ONE, 1, answering(answer.to_vec()));
        let error = done.expect_err("the answer is invalid");
        assert!(error.contains(expected), "{}: {error}", answer[..answer.len().min(40)].escape_ascii());
        assert_eq!(tally.operations(), 0, "a failed operation is not counted");
    }
    for (answer, expected) in
        [(&b"*2\r\n"[..], "an MGET of 1 keys: '*2'"), (b"*-1\r\n", ": '*-1'"), (b"-ERR\r\n", ": '-ERR'")]
    {
        let error = worked::<MGet>(READS, ONE, 1, answering(answer.to_vec())).0.expect_err("no answer");
        assert!(error.contains(expected), "{error}");
    }
    for (answer, expected) in [
        (&b"VALUE 0000"[..], "closed the connection"),
        (b"ERROR\r\n", "'ERROR'"),
        (b"SERVER_ERROR out of memory\r\n", "'SERVER_ERROR out of memory'"),
        (b"VALUE 00000000\r\n", "'VALUE 00000000'"),
        (b"VALUE 00000000 0 16 7 8\r\n", "'VALUE 00000000 0 16 7 8'"),
        (b"VALUE zzzzzzzz 0 16\r\n0123456789abcdef\r\nEND\r\n", "after all items of a get"),
    ] {
        let error = worked::<Memcached>(READS, ONE, 1, answering(answer.to_vec())).0.expect_err("no answer");
        assert!(error.contains(expected), "{error}");
    }
    let updates = "readproportion=0\nupdateproportion=1";
    for (answer, expected) in
        [(&b"+QUEUED\r\n"[..], "answer to a write: '+QUEUED'"), (b"-OOM command\r\n", "'-OOM command'")]
    {
        let error = worked::<Get>(updates, ONE, 1, answering(answer.to_vec())).0.expect_err("not stored");
        assert!(error.contains(expected), "{error}");
    }
    for answer in [&b"SERVER_ERROR out of memory storing object\r\n"[..], b"NOT_STORED\r\n"] {
        let error =
            worked::<Memcached>(updates, ONE, 1, answering(answer.to_vec())).0.expect_err("not stored");
        assert!(error.contains("to a set: "), "{error}");
    }
}

#[test]
fn records_that_memcached_omits_are_absent() {
    let bytes = [&b"VALUE 00000002 0 16\r\n"[..], &value(2), b"\r\nEND\r\n"].concat();
    for cut in 0..bytes.len() - 5 {
        assert_eq!(Memcached::read(&bytes[..cut], 2), Ok(None), "the answer is incomplete");
    }
    let missing = Answer { len: 0, value: None };
    assert_eq!(Memcached::read(&bytes, 1), Ok(Some(missing)));
    let found = Memcached::read(&bytes, 2).unwrap().unwrap();
    assert_eq!(found.value, Some(&*value(2)));
    let rest = &bytes[found.len..];
    assert_eq!(Memcached::read(rest, 3), Ok(Some(missing)));
    assert_eq!(Memcached::after_reads(rest), Ok(Some(5)));
}

#[test]
fn requests_have_the_format_of_their_protocol() {
    fn asked<D: Dialect>(keys: &[u64]) -> String {
        let mut out = Vec::new();
        D::encode_reads(keys, &mut out);
        D::encode_write(255, b"v", &mut out);
        out.escape_ascii().to_string()
    }
    let [one, two] = [1u64, 255].map(|number| key(number).escape_ascii().to_string());
    assert_eq!(
        asked::<Get>(&[1]),
        format!(r"*2\r\n$3\r\nGET\r\n$8\r\n{one}\r\n*3\r\n$3\r\nSET\r\n$8\r\n{two}\r\n$1\r\nv\r\n")
    );
    assert_eq!(
        asked::<MGet>(&[1, 255]),
        format!(
            r"*3\r\n$4\r\nMGET\r\n$8\r\n{one}\r\n$8\r\n{two}\r\n*3\r\n$3\r\nSET\r\n$8\r\n{two}\r\n$1\r\nv\r\n"
        )
    );
    assert_eq!(
        asked::<OfBenchmark>(&[1]),
        r"*2\r\n$3\r\nGET\r\n$16\r\nkey:000000000001\r\n*3\r\n$3\r\nSET\r\n$16\r\nkey:000000000255\r\n$1\r\nv\r\n"
    );
    assert_eq!(asked::<Memcached>(&[1, 255]), r"get 00000001 000000ff\r\nset 000000ff 0 0 1\r\nv\r\n");
}

#[test]
fn workloads_that_insert_or_scan_are_refused() {
    for (text, expected) in [
        ("readproportion=0.5\ninsertproportion=0.5", "'insert'"),
        ("readproportion=0.5\nscanproportion=0.5", "'scan'"),
    ] {
        let error = check(&Workload::parse("w", text).unwrap()).unwrap_err();
        assert!(error.contains(expected) && error.contains("choose a, b, c or f"), "{error}");
    }
    assert_eq!(check(&Workload::parse("w", READS).unwrap()), Ok(()));
}

/// Runs all parsers of a dialect on `bytes`. No parser may panic, loop, or consume more bytes than exist. The result
/// for a complete answer does not depend on the bytes after the answer.
fn take_apart<D: Dialect>(bytes: &[u8], numbers: &[u64]) {
    let _known_or_not = D::pid(bytes);
    let mut at = 0;
    if let Ok(Some(len)) = D::before_reads(bytes, numbers.len()) {
        at += len;
    }
    for &number in numbers {
        let rest = &bytes[at..];
        let Ok(Some(answer)) = D::read(rest, number) else { break };
        assert!(answer.len <= rest.len());
        assert!(
            answer.value.is_none_or(|value| value.len() <= ANSWER_BYTES_MAX && value.len() <= answer.len)
        );
        if answer.len > 0 {
            assert_eq!(
                D::read(&rest[..answer.len], number),
                Ok(Some(answer)),
                "the answer's own bytes suffice"
            );
            assert_eq!(D::read(&rest[..answer.len - 1], number), Ok(None), "one byte less is incomplete");
        }
        at += answer.len;
    }
    for len in [D::after_reads(&bytes[at..]), D::written(&bytes[at..])].into_iter().flatten().flatten() {
        assert!(len <= bytes.len() - at);
    }
}

#[test]
fn fuzz_answers_of_rivals() {
    let executions = Executions::of("answers of rivals");
    let numbers = [1, 2, 2, 9];
    let bulk = |number| [&b"$16\r\n"[..], &value(number), b"\r\n"].concat();
    let text =
        |number: u64| [format!("VALUE {number:08x} 0 16\r\n").as_bytes(), &value(number), b"\r\n"].concat();
    let gets = [bulk(1), bulk(2), bulk(2), b"$-1\r\n+OK\r\n".to_vec()].concat();
    let seeds = [
        gets.clone(),
        [b"*4\r\n".to_vec(), gets].concat(),
        [text(1), text(2), text(2), b"END\r\nSTORED\r\n".to_vec()].concat(),
        b"$29\r\nprocess_id:123\r\nuptime:99999\r\n\r\n".to_vec(),
        b"STAT pid 123\r\nSTAT uptime 4\r\nEND\r\n".to_vec(),
        b"-ERR wrong\r\nSERVER_ERROR x\r\n".to_vec(),
    ];
    let inputs = bolero::check!().with_test_time(budget()).with_type().cloned();
    inputs.for_each(|(seed, changes): (u8, Vec<Change>)| {
        executions.one_more();
        let mut bytes = seeds[usize::from(seed) % seeds.len()].clone();
        change(&mut bytes, &changes);
        take_apart::<Get>(&bytes, &numbers);
        take_apart::<MGet>(&bytes, &numbers);
        take_apart::<Memcached>(&bytes, &numbers);
        let _said_or_not = benchmark::parse(&String::from_utf8_lossy(&bytes), "GET");
    });
}

//! Attacks with malformed HTTP on the node's admin endpoint.

use crate::attacks::target::Target;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

#[test]
fn malformed_http_does_no_harm() {
    let target = Target::start();
    let witness = target.witness("udp");
    let before = target.now();
    let long = "x".repeat(1 << 20);
    let lines = |count: usize| (0..count).map(|n| format!("H{n}: v\r\n")).collect::<String>();
    let questions: Vec<Vec<u8>> = vec![
        b"\0\xff\xfe".to_vec(),
        b"GET\r\n\r\n".to_vec(),
        b"GET /../../etc/passwd HTTP/1.1\r\nHost: n\r\n\r\n".to_vec(),
        b"GET /metrics%00 HTTP/1.1\r\nHost: n\r\n\r\n".to_vec(),
        b"POST /metrics HTTP/1.1\r\nHost: n\r\nContent-Length: 99999999999999999999\r\n\r\n".to_vec(),
        b"POST /stores HTTP/1.1\r\nHost: n\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n"
            .to_vec(),
        b"GET /health HTTP/9.9\r\n\r\n".to_vec(),
        format!("GET /{long} HTTP/1.1\r\nHost: n\r\n\r\n").into_bytes(),
        format!("GET /health HTTP/1.1\r\nHost: n\r\nX: {long}\r\n\r\n").into_bytes(),
        format!("GET /health HTTP/1.1\r\nHost: n\r\n{}\r\n", lines(5000)).into_bytes(),
        "GET /health HTTP/1.1\r\nHost: n\r\n\r\n".repeat(200).into_bytes(),
    ];
    for question in &questions {
        let mut stream = TcpStream::connect(target.admin).expect("the node listens");
        stream.set_read_timeout(Some(Duration::from_secs(2))).expect("a time");
        stream.set_write_timeout(Some(Duration::from_secs(2))).expect("a time");
        let _refused_in_the_middle = stream.write_all(question);
        let _half = stream.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        let _hung_up = stream.read_to_end(&mut answer);
        let answer = String::from_utf8_lossy(&answer);
        assert!(!answer.contains("root:"), "{answer:.200}");
    }
    // Metrics contain no key and no address, and their number does not grow with the number of stores.
    let lines = target.http("/metrics").lines().count();
    for n in 0..5 {
        target.node.run(["store", "create", &format!("s{n}"), "--quota", "2MiB", "--items", "10"]).done();
    }
    assert_eq!(target.http("/metrics").lines().count(), lines, "labels are bounded");
    assert!(!target.http("/stores").contains("secret"));
    witness.assert_well();
    drop(witness);
    target.assert_as_before(before);
}

//! Transactions of Redis: WATCH and MGET, then MULTI, MSET and EXEC.
//!
//! A watch belongs to a connection, so each transaction in flight has one of its own. A transaction is two round trips.
//! If a watched key was written meanwhile, EXEC does nothing, and the transaction is tried again.
//!
//! Invariant: records, keys and checks are those of [`crate::txn`]. All bytes of every record that is read are checked.

use super::words::{block, line, number, shown};
use super::{Address, Inbox, PATIENCE};
use crate::driver::Work;
use crate::latched::{counted, fill};
use crate::txn::{Drawn, Source, TxnWork};
use crate::workload::key;
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use std::io::Write;
use std::net::TcpStream;
use std::time::Instant;

/// Number of records that one request loads or reads.
const PER_REQUEST: u64 = 64;
/// Number of rounds over all connections between two readings of the clock.
const ROUNDS: u32 = 4096;

/// Numbers of transactions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// Number of transactions that have committed.
    pub commits: u64,
    /// Number of attempts that were answered.
    pub attempts: u64,
}

/// The connections of one client thread, which polls them in turn.
pub struct Client {
    links: Vec<Link>,
    /// Length of a value in bytes.
    len: usize,
    /// Number of updates of records so far.
    updates: u64,
}

/// A connection, and its transaction.
struct Link {
    stream: TcpStream,
    inbox: Inbox,
    out: Vec<u8>,
    /// The records of the transaction in progress, and what it waits for.
    drawn: Option<Drawn>,
    waits: Waits,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Waits {
    /// The values of the watched records.
    Values,
    /// The outcome of EXEC.
    Outcome,
}

impl Client {
    /// Opens this number of connections to a server, for values of `len` bytes.
    ///
    /// # Errors
    /// A connection failed, or the address is no TCP address.
    pub fn connect(address: &Address, connections: u32, len: usize) -> Result<Client, String> {
        let Address::Tcp(address) = address else { return Err("transactions are measured over TCP".into()) };
        let link = |_| {
            let stream = TcpStream::connect_timeout(address, PATIENCE)?;
            stream.set_nodelay(true)?;
            let (inbox, out) = (Inbox::default(), Vec::new());
            Ok(Link { stream, inbox, out, drawn: None, waits: Waits::Values })
        };
        let links = (0..connections).map(link).collect::<std::io::Result<_>>();
        let links = links.map_err(|error| format!("the connection failed: {error}"))?;
        Ok(Client { links, len, updates: 0 })
    }

    /// Stores this number of records, each with a count of 1.
    ///
    /// # Errors
    /// The server refused a record.
    pub fn load(&mut self, records: u64) -> Result<(), String> {
        let (link, mut value) = (&mut self.links[0], vec![0; self.len]);
        for first in (0..records).step_by(PER_REQUEST as usize) {
            let numbers = first..records.min(first + PER_REQUEST);
            begin(&mut link.out, b"MSET", 2 * (numbers.end - first));
            for record in numbers {
                fill(record, 1, &mut value);
                argument(&mut link.out, &key(record));
                argument(&mut link.out, &value);
            }
            link.send()?;
            link.wait(|bytes| expect(bytes, b"+OK"))?;
        }
        Ok(())
    }

    /// Returns the sum of the counts of this number of records, and the sum that the client's transactions must have
    /// left, if it is the only client.
    ///
    /// # Errors
    /// A record is absent, or has wrong bytes.
    pub fn sums(&mut self, records: u64) -> Result<(u64, u64), String> {
        let (link, len, mut sum) = (&mut self.links[0], self.len, 0);
        for first in (0..records).step_by(PER_REQUEST as usize) {
            let numbers = first..records.min(first + PER_REQUEST);
            let count = numbers.end - first;
            begin(&mut link.out, b"MGET", count);
            numbers.clone().for_each(|record| argument(&mut link.out, &key(record)));
            link.send()?;
            link.wait(|bytes| expect(bytes, format!("*{count}").as_bytes()))?;
            for record in numbers {
                let mut found = 0;
                link.wait(|bytes| {
                    let Some((value, taken)) = value(bytes)? else { return Ok(None) };
                    found = count_of(record, value, len)?;
                    Ok(Some(taken))
                })?;
                sum += found;
            }
        }
        Ok((sum, records + self.updates))
    }

    /// Runs transactions on all connections while `goes_on` returns true, and then those in progress to their ends.
    ///
    /// # Errors
    /// The server refused a request, or sent an invalid answer or wrong bytes.
    pub fn work(&mut self, source: &mut Source, goes_on: impl Fn() -> bool) -> Result<Done, String> {
        let mut done = Done::default();
        let (mut heard, mut rounds) = (Instant::now(), 0_u32);
        for link in &mut self.links {
            link.begin(TxnWork::draw(source))?;
        }
        let mut busy = self.links.len();
        while busy > 0 {
            let mut has_heard = false;
            for link in self.links.iter_mut().filter(|link| link.drawn.is_some()) {
                if !link.look()? {
                    continue;
                }
                has_heard = true;
                let Some(is_committed) = link.step(self.len)? else { continue };
                done.attempts += 1;
                let drawn = link.drawn.take().expect("it was in progress");
                if !is_committed {
                    link.begin(drawn)?;
                    continue;
                }
                done.commits += 1;
                self.updates += drawn.records().count() as u64;
                match goes_on() {
                    true => link.begin(TxnWork::draw(source))?,
                    false => busy -= 1,
                }
            }
            rounds = rounds.wrapping_add(1);
            if has_heard && rounds.is_multiple_of(64) {
                heard = Instant::now();
            } else if rounds.is_multiple_of(ROUNDS) && !has_heard && heard.elapsed() > PATIENCE {
                return Err(super::silent());
            }
        }
        Ok(done)
    }
}

impl Link {
    /// Begins a transaction: watches its records, and asks for their values.
    fn begin(&mut self, drawn: Drawn) -> Result<(), String> {
        for command in [b"WATCH".as_slice(), b"MGET"] {
            begin(&mut self.out, command, drawn.records().count() as u64);
            drawn.records().for_each(|record| argument(&mut self.out, &key(record)));
        }
        (self.drawn, self.waits) = (Some(drawn), Waits::Values);
        self.send()
    }

    /// Takes the next step of the transaction, if all answers to the one before are here. Returns whether the
    /// transaction has committed, once its outcome is known.
    fn step(&mut self, len: usize) -> Result<Option<bool>, String> {
        let drawn = self.drawn.expect("a transaction is in progress");
        let bytes = self.inbox.bytes();
        match self.waits {
            Waits::Values => {
                let mut at = 0;
                for expected in [b"+OK".to_vec(), format!("*{}", drawn.records().count()).into_bytes()] {
                    let Some(taken) = expect(&bytes[at..], &expected)? else { return Ok(None) };
                    at += taken;
                }
                begin(&mut self.out, b"MULTI", 0);
                begin(&mut self.out, b"MSET", 2 * drawn.records().count() as u64);
                let mut updated = vec![0; len];
                for record in drawn.records() {
                    let Some((value, taken)) = value(&bytes[at..])? else {
                        self.out.clear();
                        return Ok(None);
                    };
                    at += taken;
                    fill(record, count_of(record, value, len)? + 1, &mut updated);
                    argument(&mut self.out, &key(record));
                    argument(&mut self.out, &updated);
                }
                begin(&mut self.out, b"EXEC", 0);
                self.inbox.take(at);
                self.waits = Waits::Outcome;
                self.send()?;
                Ok(None)
            }
            Waits::Outcome => {
                let mut at = 0;
                for expected in [b"+OK".as_slice(), b"+QUEUED"] {
                    let Some(taken) = expect(&bytes[at..], expected)? else { return Ok(None) };
                    at += taken;
                }
                let Some(outcome) = line(&bytes[at..])? else { return Ok(None) };
                at += outcome.len() + 2;
                let is_committed = match outcome {
                    b"*-1" => false,
                    b"*1" => {
                        let Some(taken) = expect(&bytes[at..], b"+OK")? else { return Ok(None) };
                        at += taken;
                        true
                    }
                    other => return Err(format!("unexpected answer to an EXEC: {}", shown(other))),
                };
                self.inbox.take(at);
                Ok(Some(is_committed))
            }
        }
    }

    /// Sends the bytes of `out`. The server reads them: at most one transaction's requests are in flight.
    fn send(&mut self) -> Result<(), String> {
        self.stream.write_all(&self.out).map_err(|error| format!("the connection failed: {error}"))?;
        self.out.clear();
        Ok(())
    }

    /// Receives what has arrived. Returns whether that is something.
    fn look(&mut self) -> Result<bool, String> {
        match recv(&self.stream, &mut *self.inbox.place()?, RecvFlags::DONTWAIT) {
            Ok((_, 0)) => Err("the server closed the connection before the end of an answer".into()),
            Ok((_, received)) => {
                self.inbox.filled(received);
                Ok(true)
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            Err(error) => Err(format!("the connection failed: {error}")),
        }
    }

    /// Waits for a part of an answer. `parse` returns its length in bytes; `None` if it is incomplete.
    fn wait(&mut self, mut parse: impl FnMut(&[u8]) -> Result<Option<usize>, String>) -> Result<(), String> {
        let since = Instant::now();
        loop {
            if let Some(len) = parse(self.inbox.bytes())? {
                self.inbox.take(len);
                return Ok(());
            }
            if !self.look()? && since.elapsed() > PATIENCE {
                return Err(super::silent());
            }
        }
    }
}

/// Appends the head of a command with this number of arguments.
fn begin(out: &mut Vec<u8>, command: &[u8], arguments: u64) {
    out.extend_from_slice(format!("*{}\r\n", arguments + 1).as_bytes());
    argument(out, command);
}

fn argument(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend_from_slice(format!("${}\r\n", bytes.len()).as_bytes());
    out.extend_from_slice(bytes);
    out.extend_from_slice(b"\r\n");
}

/// Returns the length of a line of an answer with its CRLF; `None` if it is incomplete.
///
/// # Errors
/// It is another line.
fn expect(bytes: &[u8], expected: &[u8]) -> Result<Option<usize>, String> {
    match line(bytes)? {
        None => Ok(None),
        Some(found) if found == expected => Ok(Some(found.len() + 2)),
        Some(other) => Err(format!("unexpected answer instead of {}: {}", shown(expected), shown(other))),
    }
}

/// Returns a value at the start of an answer, and the length of the answer; `None` if it is incomplete.
///
/// # Errors
/// It is no value.
fn value(bytes: &[u8]) -> Result<Option<(&[u8], usize)>, String> {
    let Some(first) = line(bytes)? else { return Ok(None) };
    let len = first.strip_prefix(b"$").and_then(number);
    let len = len.ok_or_else(|| format!("unexpected answer to a read: {}", shown(first)))?;
    block(bytes, first.len(), len)
}

fn count_of(record: u64, value: &[u8], len: usize) -> Result<u64, String> {
    let count = counted(record, value).filter(|_| value.len() == len);
    count.ok_or_else(|| format!("record {record} has no value, or a wrong one"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_parsed_whole_or_not_at_all() {
        let answer = b"$3\r\nabc\r\n";
        for cut in 0..answer.len() {
            assert_eq!(value(&answer[..cut]), Ok(None));
        }
        assert_eq!(value(answer), Ok(Some((&b"abc"[..], answer.len()))));
        assert!(value(b"$-1\r\n").is_err() && value(b"+OK\r\n").is_err());
        assert_eq!((expect(b"+OK", b"+OK"), expect(b"+OK\r\n$", b"+OK")), (Ok(None), Ok(Some(5))));
        assert!(expect(b"-ERR no\r\n", b"+OK").is_err_and(|refused| refused.contains("-ERR no")));
    }

    #[test]
    fn a_record_with_wrong_bytes_is_refused() {
        let mut bytes = [0; 16];
        fill(7, 3, &mut bytes);
        assert_eq!(count_of(7, &bytes, 16), Ok(3));
        assert!(count_of(8, &bytes, 16).is_err() && count_of(7, &bytes[..8], 16).is_err());
    }
}

//! Physical floor of a GET and of an overwrite over messages. A server does the same by hand as the floor in one
//! process, and a client sends requests over a ring in shared memory, datagrams or a stream.
//!
//! The request of a GET has a key, and its reply has the item. The request of an overwrite also has the value, and its
//! reply has no item. Up to `tasks` requests are in flight, in two or three messages.
//! While the server works on one message, the client works on another.
//!
//! Invariant: replies come in the order of their requests, so lost or swapped replies are detected and counted.
//! Invariant: neither side allocates memory after the start.
//! Invariant: a client waits at most [`ANSWER_TIMEOUT`] for a server that has exited.

mod client;
mod message;
mod ring;
mod server;
mod tcp;
mod udp;

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::thread;
use std::time::{Duration, Instant};

use super::measure::check_tasks;
use super::overwrite::Values;
use super::table::{VALUE, check as check_layout};
use super::{Layout, TASKS_MAX, Workload};
use client::{Measures, Requester};
use message::{ECHO, FETCH, Format, REPLY_SIZE_MAX, reply_size};
use server::{ItemSource, ServerEnd};

/// Time after which a client without a reply assumes that the server has exited.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum size of a value, in bytes, that an echo carries. With header, key and trailer, a reply fits one datagram.
pub const ECHO_VALUE_SIZE_MAX: u32 = 60 << 10;

const _: () = assert!(VALUE + (ECHO_VALUE_SIZE_MAX as usize) < REPLY_SIZE_MAX - 64);

/// Medium that carries the messages of an echo.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    /// Two rings in shared memory.
    Ring,
    /// Connected datagram sockets on loopback.
    Udp,
    /// A TCP stream on loopback.
    Tcp,
}

/// Parameters of an echo. Client and server must use the same parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Echo {
    /// Medium that carries the messages.
    pub medium: Medium,
    /// Operations that the client requests.
    pub workload: Workload,
    /// Content of the server's memory, with values of at most [`ECHO_VALUE_SIZE_MAX`] bytes. The server itself
    /// determines the number of spare buffers.
    pub layout: Layout,
    /// Number of requests in flight, 1 to [`TASKS_MAX`].
    pub tasks: usize,
    /// Whether the server omits the fetch. The messages are the same, with one item that stays in the server's cache.
    pub bare: bool,
    /// Whether both sides sleep until a message arrives. Otherwise they poll without a pause.
    pub blocking: bool,
}

/// Result of one measurement of an echo.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Echoed {
    /// Number of requests answered.
    pub ops: u64,
    /// Duration of the measurement in seconds, without the pauses between requests.
    pub seconds: f64,
    /// Number of requests answered per second.
    pub ops_per_s: f64,
    /// Median time from sending a message of requests to receiving all its replies, in microseconds; sampled.
    pub rtt_us_p50: f64,
    /// Number of replies that lack the key or its own item, or are out of order. It is 0, unless this program or the
    /// host is faulty.
    pub mismatches: u64,
}

/// Client's end of a channel. Dropping it makes the server exit.
pub struct EchoClient(Box<dyn Measures>);

impl Echo {
    /// Creates a channel: the client's end, and a descriptor to [`serve`](Echo::serve) in another process or thread.
    ///
    /// # Errors
    /// `InvalidInput` if a parameter is out of range or exceeds the medium; otherwise the operating system's error for
    /// memory or sockets.
    pub fn open(&self) -> io::Result<(EchoClient, OwnedFd)> {
        self.check()?;
        Ok(match self.medium {
            Medium::Ring => {
                let (near, far) = ring::open(self)?;
                (EchoClient(Box::new(self.requester(near))), far)
            }
            Medium::Udp => {
                let (near, far) = udp::open(self)?;
                (EchoClient(Box::new(self.requester(near))), far)
            }
            Medium::Tcp => {
                let (near, far) = tcp::open(self)?;
                (EchoClient(Box::new(self.requester(near))), far)
            }
        })
    }

    /// Fills the memory, calls `ready` with its page size in bytes, and answers requests until the client's end is
    /// dropped. Then checks that the overwrites have left whole values and have lost no buffer.
    ///
    /// # Errors
    /// `InvalidInput` if a parameter is out of range, or `far` is not a channel with the parameters of `self`;
    /// `InvalidData` for an invalid request, or if the check fails; otherwise the operating system's error.
    pub fn serve(&self, far: OwnedFd, ready: impl FnOnce(u64) -> io::Result<()>) -> io::Result<()> {
        self.check()?;
        match self.medium {
            Medium::Ring => self.serve_by(ring::Far::new(self, far)?, ready),
            Medium::Udp => self.serve_by(udp::Far::new(self, far)?, ready),
            Medium::Tcp => self.serve_by(tcp::Far::new(self, far)?, ready),
        }
    }

    fn serve_by(&self, far: impl ServerEnd, ready: impl FnOnce(u64) -> io::Result<()>) -> io::Result<()> {
        let mut source = ItemSource::new(self)?;
        ready(source.page_size() as u64)?;
        server::serve(far, &mut source)?;
        source.check()
    }

    fn requester<N>(&self, near: N) -> Requester<N> {
        Requester::new(near, self)
    }

    fn check(&self) -> io::Result<()> {
        check_tasks(self.tasks)?;
        if self.layout.value_size > ECHO_VALUE_SIZE_MAX {
            return Err(invalid(format!(
                "values of {} bytes: a message carries 0 to {ECHO_VALUE_SIZE_MAX}",
                self.layout.value_size
            )));
        }
        check_layout(&self.layout).map(drop)
    }

    fn item_size(&self) -> usize {
        VALUE + self.layout.value_size as usize
    }

    /// Returns the size in bytes of a reply on a socket.
    fn reply_size(&self) -> usize {
        reply_size(self.item_size())
    }

    fn format(&self) -> Format {
        Format {
            op: if self.bare { ECHO } else { FETCH },
            has_overwrites: self.workload == Workload::A,
            item_size: self.item_size(),
            value_size: self.layout.value_size as usize,
        }
    }

    /// Returns the values that the client writes.
    fn values(&self) -> Values {
        Values::new(self.layout.value_size as usize)
    }

    /// Returns the number of requests in a message. The requests in flight are divided among a few messages whose
    /// replies fit a datagram.
    fn tasks_per_message(&self) -> usize {
        let fitting = REPLY_SIZE_MAX / self.reply_size();
        self.tasks.div_ceil(self.medium.messages()).min(fitting).max(1)
    }
}

impl Medium {
    /// Returns the best number of messages in flight. The client works on one message while the server works on
    /// another. On a socket, each message takes one or two system calls, so more messages cost more than they gain. A
    /// ring takes no system call: a third message was up to 20 % faster, because that message moves between the caches
    /// while both sides work.
    fn messages(self) -> usize {
        match self {
            Self::Ring => 3,
            Self::Udp | Self::Tcp => 2,
        }
    }
}

impl EchoClient {
    /// Requests the keys that [`Floor::keys`](super::Floor::keys) lists, for about `duration`.
    ///
    /// # Errors
    /// The operating system's error; `TimedOut` if the server did not answer for [`ANSWER_TIMEOUT`]. After an error,
    /// requests may still be in flight: drop the client.
    pub fn measure(&mut self, duration: Duration) -> io::Result<Echoed> {
        self.0.measure(duration)
    }

    /// Sleeps for `pause` before each of `rounds` rounds. In a round, every task sends one request. The result has the
    /// median of the rounds' times.
    ///
    /// # Errors
    /// The errors of [`measure`](EchoClient::measure).
    pub fn measure_idle(&mut self, pause: Duration, rounds: u32) -> io::Result<Echoed> {
        self.0.measure_idle(pause, rounds)
    }
}

impl fmt::Debug for EchoClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EchoClient").finish_non_exhaustive()
    }
}

/// State of polling for the next message. After every `polls_per_yield` polls, the poller yields the CPU, because the
/// other side may need it.
struct Poller {
    polls: u32,
    polls_per_yield: u32,
    timeout: Option<Duration>,
    yielded: Option<Instant>,
}

impl Poller {
    fn new(polls_per_yield: u32, timeout: Option<Duration>) -> Self {
        Self { polls: 0, polls_per_yield, timeout, yielded: None }
    }

    /// Restarts the timeout after a message has arrived.
    #[inline(always)]
    fn renew(&mut self) {
        self.polls = 0;
        self.yielded = None;
    }

    /// Pauses between two polls.
    ///
    /// # Errors
    /// `TimedOut` if no message arrived within the timeout.
    #[inline(always)]
    fn wait(&mut self) -> io::Result<()> {
        std::hint::spin_loop();
        self.polls += 1;
        if self.polls < self.polls_per_yield { Ok(()) } else { self.give_way() }
    }

    #[cold]
    fn give_way(&mut self) -> io::Result<()> {
        self.polls = 0;
        thread::yield_now();
        let Some(timeout) = self.timeout else { return Ok(()) };
        let since = *self.yielded.get_or_insert_with(Instant::now);
        if since.elapsed() < timeout { Ok(()) } else { Err(no_answer()) }
    }
}

fn invalid(wrong: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, wrong)
}

fn no_answer() -> io::Error {
    let wrong =
        format!("no answer for {} s: the server has exited, or a message was lost", ANSWER_TIMEOUT.as_secs());
    io::Error::new(io::ErrorKind::TimedOut, wrong)
}

#[cfg(test)]
mod tests {
    use std::net::{TcpStream, UdpSocket};
    use std::thread::JoinHandle;

    use super::*;
    use crate::floor::{Floor, HugePages};
    use message::{Asked, OVERWRITE, REQUEST_SIZE};

    const WORKLOADS: [Workload; 2] = [Workload::A, Workload::C];
    const MEDIA: [Medium; 3] = [Medium::Ring, Medium::Udp, Medium::Tcp];
    const A_WHILE: Duration = Duration::from_millis(20);

    fn echo(medium: Medium, tasks: usize) -> Echo {
        let layout = Layout {
            records: 3000,
            value_size: 100,
            spares: 0,
            collision_free: false,
            huge_pages: HugePages::No,
            seed: 7,
        };
        Echo { medium, workload: Workload::C, layout, tasks, bare: false, blocking: false }
    }

    /// Starts a client, and a thread that serves the client until the client is dropped.
    fn started(asked: Echo, served: Echo) -> (EchoClient, JoinHandle<io::Result<()>>) {
        let (client, far) = asked.open().unwrap();
        (client, thread::spawn(move || served.serve(far, |_page_size| Ok(()))))
    }

    /// Returns the result of a client with the parameters `asked` at a server with the parameters `served`.
    fn measured(asked: Echo, served: Echo) -> Echoed {
        let (mut client, server) = started(asked, served);
        let echoed = client.measure(A_WHILE).unwrap();
        drop(client);
        server.join().unwrap().unwrap();
        echoed
    }

    #[test]
    fn every_medium_returns_the_items_of_the_requested_keys() {
        for medium in MEDIA {
            for tasks in [1, 2, 7, 48, TASKS_MAX] {
                for (bare, blocking) in [(false, false), (true, false), (false, true)] {
                    for workload in WORKLOADS {
                        let echo = Echo { workload, bare, blocking, ..echo(medium, tasks) };
                        let echoed = measured(echo, echo);
                        assert_eq!(echoed.mismatches, 0, "{echo:?}");
                        assert!(
                            echoed.ops >= 256 && echoed.seconds >= 0.02 && echoed.rtt_us_p50 > 0.0,
                            "{echoed:?}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn values_of_every_valid_size_are_carried() {
        for medium in MEDIA {
            for (value_size, tasks) in [(0, 1), (0, 64), (1, 5), (4096, 64), (ECHO_VALUE_SIZE_MAX, 2)] {
                let echo = echo(medium, tasks);
                let echo = Echo { layout: Layout { value_size, records: 100, ..echo.layout }, ..echo };
                for (bare, workload) in
                    [false, true].into_iter().flat_map(|bare| WORKLOADS.map(|w| (bare, w)))
                {
                    let echo = Echo { workload, bare, ..echo };
                    assert_eq!(measured(echo, echo).mismatches, 0, "{echo:?}");
                }
            }
        }
    }

    #[test]
    fn a_client_may_pause_and_measure_again() {
        for medium in MEDIA {
            for tasks in [1, 5] {
                let echo = Echo { blocking: true, workload: Workload::A, ..echo(medium, tasks) };
                let (mut client, server) = started(echo, echo);
                for _ in 0..2 {
                    let idle = client.measure_idle(Duration::from_millis(2), 5).unwrap();
                    assert_eq!((idle.ops, idle.mismatches), (5 * tasks as u64, 0), "{echo:?}");
                    assert!(idle.rtt_us_p50 > 0.0 && idle.seconds > 0.0, "{idle:?}");
                    assert_eq!(client.measure(A_WHILE).unwrap().mismatches, 0, "{echo:?}");
                }
                drop(client);
                server.join().unwrap().unwrap();
            }
        }
    }

    #[test]
    fn keys_missing_at_the_server_are_counted() {
        for medium in MEDIA {
            for tasks in [1, 64] {
                for workload in WORKLOADS {
                    let asked = Echo { workload, ..echo(medium, tasks) };
                    let served = Echo { layout: Layout { records: 1500, ..asked.layout }, ..asked };
                    let echoed = measured(asked, served);
                    // About half of the requested keys are missing: they are uniform over the whole range.
                    let share = echoed.mismatches as f64 / echoed.ops as f64;
                    assert!((0.3..0.7).contains(&share), "{echoed:?}");
                }
            }
        }
    }

    #[test]
    fn a_reply_with_a_wrong_byte_key_or_order_is_counted() {
        let echo = echo(Medium::Udp, 1);
        let floor = Floor::build(echo.layout).unwrap();
        let item_size = echo.item_size();
        type Spoil = fn(&mut [u8], usize);
        let spoils: [(&str, Spoil); 4] = [
            ("the value's last byte", |reply, item_size| reply[item_size - 1] ^= 1),
            ("the key", |reply, _| reply[VALUE - 1] ^= 1),
            ("found", |reply, item_size| reply[item_size.next_multiple_of(8)] = 0),
            ("the id", |reply, _| *reply.last_mut().unwrap() ^= 1),
        ];
        for (what, spoil) in spoils {
            let (mut client, far) = echo.open().unwrap();
            let far = UdpSocket::from(far);
            let liar = thread::spawn({
                let values: Vec<Vec<u8>> = (0..echo.layout.records)
                    .map(|number| floor.get(number, &mut Vec::new()).unwrap().to_vec())
                    .collect();
                move || {
                    let mut request = [0; REQUEST_SIZE];
                    for asked in 0.. {
                        if far.recv(&mut request).unwrap() == 0 {
                            return;
                        }
                        let number = u64::from_ne_bytes(request[8..16].try_into().unwrap());
                        let mut reply = vec![0; reply_size(item_size)];
                        reply[VALUE - 8..VALUE].copy_from_slice(&number.to_be_bytes());
                        reply[VALUE..item_size].copy_from_slice(&values[number as usize]);
                        let trailer = item_size.next_multiple_of(8);
                        reply[trailer] = 1;
                        reply[trailer + 8..].copy_from_slice(&request[..8]);
                        if asked == 3 {
                            spoil(&mut reply, item_size);
                        }
                        far.send(&reply).unwrap();
                    }
                }
            });
            assert_eq!(client.measure(A_WHILE).unwrap().mismatches, 1, "{what}");
            drop(client);
            liar.join().unwrap();
        }
    }

    #[test]
    fn parameters_out_of_range_are_refused() {
        let legal = echo(Medium::Udp, 4);
        for (wrong, expected) in [
            (Echo { tasks: 0, ..legal }, "0 tasks: the valid range is 1 to 64"),
            (Echo { tasks: 65, ..legal }, "65 tasks: the valid range is 1 to 64"),
            (Echo { layout: Layout { value_size: 61_441, ..legal.layout }, ..legal }, "0 to 61440"),
            (Echo { layout: Layout { records: 0, ..legal.layout }, ..legal }, "0 records"),
        ] {
            let refusal = wrong.open().unwrap_err();
            assert_eq!(refusal.kind(), io::ErrorKind::InvalidInput);
            assert!(refusal.to_string().contains(expected), "{refusal}");
        }
    }

    #[test]
    fn a_descriptor_that_is_no_channel_is_refused() {
        let ring = || echo(Medium::Ring, 4).open().unwrap().1;
        let socket = || echo(Medium::Udp, 4).open().unwrap().1;
        for (medium, tasks, far) in [
            (Medium::Udp, 4, ring()),
            (Medium::Tcp, 4, ring()),
            (Medium::Ring, 4, socket()),
            (Medium::Ring, 64, ring()),
        ] {
            let refusal =
                echo(medium, tasks).serve(far, |_| unreachable!("the server does not start")).unwrap_err();
            assert_eq!(refusal.kind(), io::ErrorKind::InvalidInput, "{medium:?}");
            assert!(
                refusal.to_string().contains("use the one that was created with the client's end"),
                "{refusal}"
            );
        }
    }

    #[test]
    fn an_overwrite_is_seen_by_the_fetches_after_it() {
        for medium in MEDIA {
            // One key: each fetch returns the value of the last overwrite before it, or the first value.
            let layout = Layout { records: 1, ..echo(medium, 1).layout };
            let echo = Echo { workload: Workload::A, layout, ..echo(medium, 1) };
            let values = echo.values();
            let serve = move |far: OwnedFd| thread::spawn(move || echo.serve(far, |_| Ok(())));
            let kinds = [false, true, false, false, true, true, false];
            let expected = [0, 0, 41, 41, 41, 41, 45];
            let mut asked = Asked::new();
            for (id, is_overwrite) in (1..).zip(kinds) {
                asked.enter(id, 0, is_overwrite, 40 + id as u8 - 1);
            }
            let see = |near: &mut dyn FnMut(u64) -> Vec<u8>| {
                for ((id, is_overwrite), first) in (1..).zip(kinds).zip(expected) {
                    let item = near(id);
                    match is_overwrite {
                        true => assert!(item.is_empty(), "the reply to an overwrite is short"),
                        false => assert_eq!(&item[VALUE..], values.starting_with(first), "{medium:?} {id}"),
                    }
                }
            };
            let server = match medium {
                Medium::Ring => {
                    let (mut near, far) = ring::open(&echo).unwrap();
                    let server = serve(far);
                    see(&mut |id| exchanged(&mut near, id, &asked));
                    server
                }
                Medium::Udp => {
                    let (mut near, far) = udp::open(&echo).unwrap();
                    let server = serve(far);
                    see(&mut |id| exchanged(&mut near, id, &asked));
                    server
                }
                Medium::Tcp => {
                    let (mut near, far) = tcp::open(&echo).unwrap();
                    let server = serve(far);
                    see(&mut |id| exchanged(&mut near, id, &asked));
                    server
                }
            };
            server.join().unwrap().unwrap();
        }
    }

    /// Sends the request `id` of `asked`, and returns the item in its reply.
    fn exchanged(near: &mut impl client::ClientEnd, id: u64, asked: &Asked) -> Vec<u8> {
        near.send(id, 1, asked).unwrap();
        let mut item = Vec::new();
        let mut each = |reply: message::Reply<'_>| {
            assert!(reply.found && reply.id == id);
            item = reply.item.to_vec();
        };
        while near.take(id, 1, asked, &mut each).unwrap() == 0 {
            thread::yield_now();
        }
        item
    }

    #[test]
    fn an_invalid_request_ends_the_server_with_an_error() {
        let requested = echo(Medium::Udp, 4);
        let asked = Asked::new();
        let request = |id, op| message::request(id, &asked, op);
        for wrong in [
            vec![7; 5],
            request(1, 9).to_vec(),
            request(1, FETCH | OVERWRITE).to_vec(),
            [request(1, FETCH), request(3, FETCH)].concat(),
            [&request(1, FETCH)[..], &[0; 8]].concat(),
        ] {
            let near = UdpSocket::bind("127.0.0.1:0").unwrap();
            let far = UdpSocket::bind("127.0.0.1:0").unwrap();
            near.connect(far.local_addr().unwrap()).unwrap();
            far.connect(near.local_addr().unwrap()).unwrap();
            near.send(&wrong).unwrap();
            let refusal = requested.serve(far.into(), |_| Ok(())).unwrap_err();
            assert_eq!(refusal.kind(), io::ErrorKind::InvalidData, "{refusal}");
        }
        // An overwrite whose value is too short.
        let refused = Echo { workload: Workload::A, ..requested }.format();
        let short = [&request(1, FETCH | OVERWRITE)[..], &[0; 96]].concat();
        assert_eq!(message::read_requests(&short, &refused, 4).unwrap().numbers().len(), 0);
        // The client has other flags than the server.
        let (mut client, server) = started(Echo { bare: true, ..echo(Medium::Tcp, 4) }, echo(Medium::Tcp, 4));
        assert!(client.measure(A_WHILE).is_err());
        assert_eq!(server.join().unwrap().unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn a_server_that_has_exited_is_an_error() {
        for medium in [Medium::Udp, Medium::Tcp] {
            for blocking in [false, true] {
                let (mut client, far) = Echo { blocking, ..echo(medium, 4) }.open().unwrap();
                drop(far);
                let kind = client.measure(A_WHILE).unwrap_err().kind();
                assert_ne!(kind, io::ErrorKind::TimedOut, "{medium:?} reports it immediately");
            }
        }
        // A ring cannot report that its server has exited, so the client times out.
        let mut poller = Poller::new(1, Some(Duration::ZERO));
        assert_eq!(poller.wait().unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn a_stream_may_break_anywhere() {
        for workload in WORKLOADS {
            a_broken_stream(Echo { workload, ..echo(Medium::Tcp, 8) });
        }
    }

    fn a_broken_stream(echo: Echo) {
        let (mut client, far) = echo.open().unwrap();
        // A relay between client and server, which forwards a few bytes at a time.
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let to_server = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let server_end = listener.accept().unwrap().0;
        let server = thread::spawn(move || echo.serve(server_end.into(), |_| Ok(())));
        let from_client = TcpStream::from(far);
        let relay = |mut from: TcpStream, mut to: TcpStream, step: usize| {
            thread::spawn(move || {
                use std::io::{Read, Write};
                let mut bytes = vec![0; step];
                loop {
                    match from.read(&mut bytes) {
                        Ok(0) | Err(_) => return to.shutdown(std::net::Shutdown::Write).unwrap_or(()),
                        Ok(len) => to.write_all(&bytes[..len]).unwrap(),
                    }
                }
            })
        };
        for socket in [&from_client, &to_server] {
            socket.set_nodelay(true).unwrap();
        }
        let relays = [
            relay(from_client.try_clone().unwrap(), to_server.try_clone().unwrap(), 7),
            relay(to_server, from_client, 61),
        ];
        let echoed = client.measure(A_WHILE).unwrap();
        assert!(echoed.ops > 0 && echoed.mismatches == 0, "{echoed:?}");
        drop(client);
        server.join().unwrap().unwrap();
        relays.into_iter().for_each(|relay| relay.join().unwrap());
    }

    #[test]
    fn a_message_holds_a_part_of_the_requests_and_fits_a_datagram() {
        let of = |medium, tasks, value_size| {
            let echo = echo(medium, tasks);
            Echo { layout: Layout { value_size, ..echo.layout }, ..echo }.tasks_per_message()
        };
        assert_eq!([1, 2, 3, 64].map(|tasks| of(Medium::Udp, tasks, 512)), [1, 1, 2, 32]);
        assert_eq!([1, 2, 3, 64].map(|tasks| of(Medium::Ring, tasks, 512)), [1, 1, 1, 22]);
        assert_eq!([4096, ECHO_VALUE_SIZE_MAX].map(|value_size| of(Medium::Tcp, 64, value_size)), [15, 1]);
    }
}

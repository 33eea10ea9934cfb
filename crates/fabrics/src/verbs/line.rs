//! A client's RDMA connection to one engine of a node.
//!
//! Each frame of the session is one SEND on a reliable queue pair. The node's receive buffers are shared by all its
//! clients; if one side has none free, its NIC makes the sender's NIC wait.

use super::buffers::{Buffers, Pool, Sender};
use super::error::VerbsError;
use super::resources::{COMPLETIONS_AT_ONCE, Channel, Completions, Domain, NewPair, Pair, status_text};
use super::setup::{Abilities, Choice, Description, FRAME_MAX, Here, Message, SIZE, first_packet};
use super::sys::{IbvWc, is};
use crate::session::carrier::{Broken, Datagrams, Line};
use rustix::event::epoll;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

/// Time limit for each step of the set-up.
const SET_UP_WAIT: Duration = Duration::from_millis(900);
/// Number of receive buffers, and of frames in flight to the node.
const RECEIVES: u32 = 32;
const SENDS: u32 = 32;
/// Wanted size of frames that requests carry themselves.
pub(super) const INLINE: u32 = 220;
/// Bit of the numbers of receives.
pub(super) const RECEIVE: u64 = 1 << 63;
/// Number of polls without a frame between two looks at the TCP connection.
const POLLS_PER_LOOK: u32 = 256;
/// Number of completions of one-sided requests that can wait: one for each request of a broken queue pair.
const LISTS_COMPLETIONS: u32 = 1024;

/// A client's end of an RDMA connection.
pub struct VerbsLine {
    // Dropped in this order: the pair before the buffers that it uses.
    pair: Pair,
    state: RefCell<State>,
    inbox: Inbox,
    /// Completions of the one-sided requests of [`super::Endpoint`].
    lists: Inbox,
    domain: Arc<Domain>,
    channel: Arc<Channel>,
    here: Here,
    abilities: Abilities,
    node: TcpStream,
    poll: OwnedFd,
    /// Whether the channel may have events that were not taken.
    is_armed: Cell<bool>,
    polls: Cell<u32>,
}

struct State {
    sender: Sender,
    pool: Pool,
    received: Buffers,
    /// Why the connection is unusable. Frames that arrived before are still delivered.
    broken: Option<String>,
}

/// A completion queue, with the completions that were fetched while its events were enabled.
pub(super) struct Inbox {
    completions: Arc<Completions>,
    early: RefCell<VecDeque<IbvWc>>,
}

impl Inbox {
    fn new(completions: Arc<Completions>) -> Inbox {
        Inbox { completions, early: RefCell::default() }
    }

    pub(super) fn queue(&self) -> &Arc<Completions> {
        &self.completions
    }

    /// Fetches completions into `out`, and returns how many.
    #[inline]
    pub(super) fn poll(&self, out: &mut [IbvWc; COMPLETIONS_AT_ONCE]) -> Result<usize, VerbsError> {
        let mut early = self.early.borrow_mut();
        if early.is_empty() {
            return self.completions.poll(out);
        }
        let count = early.len().min(out.len());
        for (place, completion) in out.iter_mut().zip(early.drain(..count)) {
            *place = completion;
        }
        Ok(count)
    }

    /// Makes the channel report the next completion. Returns false if there is one already.
    fn arm(&self) -> Result<bool, VerbsError> {
        self.completions.arm()?;
        // A completion that came before the queue was armed is not reported.
        let mut found = [IbvWc::default(); COMPLETIONS_AT_ONCE];
        let count = self.completions.poll(&mut found)?;
        let mut early = self.early.borrow_mut();
        early.extend(&found[..count]);
        Ok(early.is_empty())
    }
}

impl VerbsLine {
    /// Connects to the node at `node`, whose port for the set-up is TCP's. Waits at most about 2 s.
    ///
    /// # Errors
    /// [`VerbsError`] says why there is no connection; nothing is left behind.
    pub fn connect(node: SocketAddr, choice: &Choice) -> Result<VerbsLine, VerbsError> {
        let local = local_address(node).map_err(VerbsError::Dial)?;
        let here = Here::open(choice, Some(local))?;
        let domain = Domain::new(&here.context)?;
        let channel = Channel::new(&here.context)?;
        let completions = Completions::new(&channel, SENDS + RECEIVES)?;
        let lists = Completions::new(&channel, LISTS_COMPLETIONS)?;
        let received = Buffers::new(&domain, RECEIVES as usize, FRAME_MAX)?;
        let pool = Pool::new(&domain, SENDS as usize, FRAME_MAX)?;
        let new = NewPair {
            sent: &completions,
            received: &completions,
            shared: None,
            sends: SENDS,
            receives: RECEIVES,
            inline: INLINE,
        };
        let pair = Pair::new(&domain, &new)?;
        pair.begin(&here.way, 0)?;
        for buffer in 0..RECEIVES {
            // SAFETY: the buffer was not posted yet, and is not used until its completion.
            unsafe { pair.post_receive(RECEIVE | u64::from(buffer), received.piece(buffer, 0, FRAME_MAX)) }?;
        }
        let first = first_packet();
        let own = Description {
            end: here.end(pair.number(), first),
            mtu: here.way.mtu,
            frame: FRAME_MAX as u32,
            abilities: Abilities::default(),
        };
        // Only now, since the node soon closes a connection that says nothing, and a device may be slow.
        let stream = TcpStream::connect_timeout(&node, SET_UP_WAIT).map_err(VerbsError::Dial)?;
        let theirs = exchange(&stream, &own)?;
        let way = super::resources::Way { mtu: theirs.mtu.min(here.way.mtu), ..here.way };
        pair.connect(&way, first, 1, &theirs.end)?;
        let here = Here { way, ..here };
        stream.set_nonblocking(true).map_err(VerbsError::Dial)?;
        let poll = watch(&stream, &channel)
            .map_err(|errno| VerbsError::Create("watch an RDMA connection", errno.into()))?;
        let state = State { sender: Sender::new(&pool, SENDS), pool, received, broken: None };
        Ok(VerbsLine {
            pair,
            state: RefCell::new(state),
            inbox: Inbox::new(completions),
            lists: Inbox::new(lists),
            domain,
            channel,
            here,
            abilities: theirs.abilities,
            node: stream,
            poll,
            is_armed: Cell::new(true),
            polls: Cell::new(0),
        })
    }

    /// The completions of one-sided requests.
    pub(super) fn lists(&self) -> &Inbox {
        &self.lists
    }

    pub(super) fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }

    pub(super) fn here(&self) -> &Here {
        &self.here
    }

    pub(super) fn abilities(&self) -> Abilities {
        self.abilities
    }

    /// Whether the node's process has closed its end.
    fn has_hung_up(&self) -> bool {
        match self.node.peek(&mut [0]) {
            Err(error) => !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
            // After the set-up, the node sends nothing.
            Ok(_) => true,
        }
    }
}

/// Returns the address of this machine from which connections to `node` start. Sends nothing.
fn local_address(node: SocketAddr) -> std::io::Result<IpAddr> {
    let any: IpAddr =
        if node.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(node)?;
    Ok(socket.local_addr()?.ip().to_canonical())
}

/// Sends the client's description and receives the node's.
fn exchange(mut stream: &TcpStream, own: &Description) -> Result<Description, VerbsError> {
    let silent = |error: std::io::Error| match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => {
            VerbsError::Dial(std::io::Error::new(ErrorKind::TimedOut, "no answer to the set-up of RDMA"))
        }
        ErrorKind::UnexpectedEof => VerbsError::Dial(std::io::Error::new(
            error.kind(),
            "the node has hung up during the set-up of RDMA",
        )),
        _ => VerbsError::Dial(error),
    };
    let foreign = VerbsError::Foreign;
    stream.set_nodelay(true).map_err(VerbsError::Dial)?;
    stream.set_read_timeout(Some(SET_UP_WAIT)).map_err(VerbsError::Dial)?;
    stream.write_all(&Message::Hello(*own).encode()).map_err(silent)?;
    let mut bytes = [0; SIZE];
    stream.read_exact(&mut bytes).map_err(silent)?;
    match Message::decode(&bytes).map_err(foreign)? {
        Message::Welcome(theirs) => Ok(theirs),
        Message::Hello(_) => Err(foreign("it answers as a client does".into())),
        Message::Refusal(len) => {
            let mut reason = vec![0; len];
            stream.read_exact(&mut reason).map_err(silent)?;
            Err(VerbsError::Refused(String::from_utf8_lossy(&reason).into_owned()))
        }
    }
}

/// Creates an epoll instance that reports the end of the TCP connection, and completions.
fn watch(stream: &TcpStream, channel: &Channel) -> rustix::io::Result<OwnedFd> {
    let poll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    epoll::add(&poll, stream, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
    epoll::add(&poll, channel, epoll::EventData::new_u64(1), epoll::EventFlags::IN)?;
    Ok(poll)
}

impl Datagrams for VerbsLine {
    fn send(&self, frame: &[u8]) -> Result<(), Broken> {
        let State { sender, pool, .. } = &mut *self.state.borrow_mut();
        sender.push(pool, frame);
        Ok(())
    }

    fn flush(&self) -> Result<(), Broken> {
        let State { sender, pool, broken, .. } = &mut *self.state.borrow_mut();
        match broken {
            Some(reason) => Err(Broken(reason.clone())),
            None => Ok(sender.flush(pool, &self.pair)?),
        }
    }

    fn receive(&self, mut take: impl FnMut(&[u8])) -> Result<bool, Broken> {
        let State { sender, pool, received, broken } = &mut *self.state.borrow_mut();
        let mut found = [IbvWc::default(); COMPLETIONS_AT_ONCE];
        let count = self.inbox.poll(&mut found)?;
        let mut has_received = false;
        for completion in &found[..count] {
            if completion.status != is::WC_SUCCESS {
                broken.get_or_insert_with(|| format!("RDMA: {}", status_text(completion.status)));
            } else if completion.wr_id & RECEIVE == 0 {
                sender.complete(pool, completion.wr_id);
            } else {
                let buffer = (completion.wr_id & !RECEIVE) as u32;
                has_received = true;
                // SAFETY: the receive has completed, so the device does not use the buffer until it is posted again.
                take(unsafe { received.bytes(buffer, (completion.byte_len as usize).min(FRAME_MAX)) });
                if broken.is_none() {
                    let piece = received.piece(buffer, 0, FRAME_MAX);
                    // SAFETY: as above; the slice is gone.
                    unsafe { self.pair.post_receive(completion.wr_id, piece) }?;
                }
            }
        }
        if count > 0 && broken.is_none() {
            sender.flush(pool, &self.pair)?; // Frames may have waited for space.
        }
        if count > 0 {
            return Ok(has_received);
        }
        let polls = self.polls.get() + 1;
        self.polls.set(polls);
        if self.is_armed.replace(false) || polls.is_multiple_of(POLLS_PER_LOOK) {
            self.channel.take_events();
            if broken.is_none() && self.has_hung_up() {
                *broken = Some("the node has hung up".into());
                return Ok(false); // Frames that arrived before are fetched by the next poll.
            }
        }
        match broken {
            Some(reason) => Err(Broken(reason.clone())),
            None => Ok(false),
        }
    }
}

impl Line for VerbsLine {
    const IS_RELIABLE: bool = true;

    fn datagram_max(&self) -> usize {
        FRAME_MAX
    }

    fn inbound_bytes(&self) -> usize {
        RECEIVES as usize * FRAME_MAX / 2
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.poll.as_fd()
    }

    fn may_sleep(&self) -> bool {
        self.channel.take_events();
        self.is_armed.set(true);
        // If a queue cannot be armed, the next poll reports why.
        let may_sleep = |inbox: &Inbox| inbox.arm().unwrap_or(false);
        may_sleep(&self.inbox) & may_sleep(&self.lists) && self.state.borrow().broken.is_none()
    }
}

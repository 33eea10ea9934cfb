//! Batches: the requests that a task sends at the same time.

use super::packet::{self, ENTRIES_MAX, Entry, HEADER_SIZE, Header, PACKET_MAX, entry_size};
use super::{STALE, mutants};
use crate::members::all;
use farside_remote::fabric::{Ran, ServiceId};
use farside_remote::service::{ADDRESS_SIZE, address};
use farside_remote::{Fabric, FabricError, Key, NodeId};
use std::convert::Infallible;

/// A node that serves requests: where it is, and the key of its store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destination {
    /// The node.
    pub node: NodeId,
    /// Key of the store whose service handles the requests.
    pub key: Key,
}

/// Requests of a task to several nodes, and their responses. A task uses one batch again and again.
#[derive(Debug)]
pub struct Batch {
    header: Header,
    /// Packets, of which the first `used` are those of the batch. The others keep their memory for later ones.
    packets: Vec<Packet>,
    used: usize,
    /// For each request, by its place in the batch: its packet, and its place among the requests of the packet.
    requests: Vec<(usize, usize)>,
    is_sent: bool,
}

/// The packet to one node.
#[derive(Debug)]
struct Packet {
    to: Destination,
    service: ServiceId,
    request: Vec<u8>,
    /// The places of its requests in the batch.
    asked: Vec<u8>,
    /// Longest possible response.
    response_max: usize,
    answer: Vec<u8>,
    /// The responses in `answer`, in the order of the requests; only one if the node has refused the epoch.
    found: Vec<Found>,
    failure: Option<FabricError>,
}

/// A response in a packet: its status, and its payload's offset and length in bytes.
#[derive(Clone, Copy, Debug)]
struct Found {
    status: u8,
    at: usize,
    len: usize,
}

/// Response to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Response<'a> {
    /// Status that the handler has returned.
    pub status: u8,
    /// Payload that the handler has written.
    pub payload: &'a [u8],
}

impl Batch {
    /// Creates the batch of a task.
    pub fn new(coordinator: u16, task: u16) -> Batch {
        let header = Header { coordinator, task, batch: 0, epoch: 0 };
        Batch { header, packets: Vec::new(), used: 0, requests: Vec::new(), is_sent: false }
    }

    /// Removes all requests, and gives the batch its next number.
    pub fn clear(&mut self, epoch: u64) {
        self.header = Header { batch: self.header.batch + 1, epoch, ..self.header };
        self.used = 0;
        self.requests.clear();
        self.is_sent = false;
    }

    /// Adds a request of a type, whose payload `write` appends. The payload of its response has at most `response_max`
    /// bytes. Returns the request's place in the batch. Returns `None`, and adds nothing, if the batch or its packet
    /// would become too large: send this batch first.
    ///
    /// # Panics
    /// If the batch was sent and not cleared.
    pub fn push(
        &mut self,
        to: Destination,
        kind: u8,
        response_max: usize,
        write: impl FnOnce(&mut Vec<u8>),
    ) -> Option<usize> {
        assert!(!self.is_sent, "a batch is cleared before it gets another request");
        if self.requests.len() == ENTRIES_MAX {
            return None;
        }
        let number = match self.packets[..self.used].iter().position(|packet| packet.to == to) {
            Some(number) => number,
            None => self.begin(to),
        };
        let packet = &mut self.packets[number];
        let (len, index) = (packet.request.len(), self.requests.len());
        let written = packet::append(&mut packet.request, ADDRESS_SIZE, (kind, index as u8), |out| {
            write(out);
            Ok::<_, Infallible>(None)
        });
        let Ok(()) = written;
        let response_max = packet.response_max + entry_size(response_max);
        if packet.request.len() > ADDRESS_SIZE + PACKET_MAX || response_max > PACKET_MAX {
            packet.request.truncate(len);
            packet::forget_last(&mut packet.request, ADDRESS_SIZE);
            if len == ADDRESS_SIZE + HEADER_SIZE {
                self.used -= 1;
            }
            return None;
        }
        packet.response_max = response_max;
        self.requests.push((number, packet.asked.len()));
        packet.asked.push(index as u8);
        Some(index)
    }

    /// Begins the packet to a node. Returns its number.
    fn begin(&mut self, to: Destination) -> usize {
        let number = self.used;
        self.used += 1;
        if number == self.packets.len() {
            let (service, response_max) = (ServiceId::NODE, 0);
            self.packets.push(Packet {
                to,
                service,
                request: Vec::new(),
                asked: Vec::new(),
                response_max,
                answer: Vec::new(),
                found: Vec::new(),
                failure: None,
            });
        }
        let packet = &mut self.packets[number];
        // Most packets go where the last one went.
        if packet.to != to {
            packet.to = to;
        }
        packet.service = address(to.key, &mut packet.request);
        packet::begin(&self.header, false, &mut packet.request);
        packet.asked.clear();
        (packet.response_max, packet.failure) = (HEADER_SIZE, None);
        number
    }

    /// Whether the batch has no request.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Sends the packets, and returns once each was answered or has failed.
    pub async fn send<F: Fabric>(&mut self, fabric: &F) {
        self.is_sent = true;
        let header = self.header;
        match &mut self.packets[..self.used] {
            [] => {}
            // Most batches have one packet, and then nothing is allocated for the send.
            [packet] => packet.send(fabric, &header).await,
            packets => drop(all(packets.iter_mut().map(|packet| packet.send(fabric, &header))).await),
        }
    }

    /// Returns the response to the request with this place in the batch.
    ///
    /// # Errors
    /// The error of the request's packet.
    ///
    /// # Panics
    /// If the batch has no such request, or was not sent.
    #[inline]
    pub fn response(&self, request: usize) -> Result<Response<'_>, &FabricError> {
        assert!(self.is_sent, "a batch has responses once it was sent");
        let (number, place) = self.requests[request];
        let packet = &self.packets[number];
        if let Some(failure) = &packet.failure {
            return Err(failure);
        }
        // A node that refuses the coordinator's epoch has run nothing, and answers once.
        let Found { status, at, len } = packet.found[place.min(packet.found.len() - 1)];
        Ok(Response { status, payload: &packet.answer[at..at + len] })
    }
}

impl Packet {
    async fn send<F: Fabric>(&mut self, fabric: &F, header: &Header) {
        let sent = fabric.call(self.to.node, self.service, &self.request, &mut self.answer).await;
        self.failure = sent.and_then(|()| self.read(header)).err();
    }

    /// Reads the answer: checks that it is that of this batch, and has a response to each request.
    fn read(&mut self, header: &Header) -> Result<(), FabricError> {
        let lost = |what: &str| {
            let reason = format!("{what}: use the same release on both sides");
            Err(FabricError::Lost { node: self.to.node, ran: Ran::Unknown, reason })
        };
        let Some((of, entries)) = packet::decode(&self.answer, true) else {
            return lost("the store's answer is no packet of responses");
        };
        let is_own = of == *header || mutants::OLD_RESPONSE_ACCEPTED.is_on();
        if !is_own {
            return lost("the store has answered another batch of requests");
        }
        self.found.clear();
        let mut asked = self.asked.iter();
        let mut are_all = true;
        let mut at = HEADER_SIZE;
        for Entry { kind, index, payload } in entries {
            let (from, len) = (at + entry_size(0), payload.len());
            self.found.push(Found { status: kind, at: from, len });
            at += entry_size(len);
            are_all &= asked.next() == Some(&index);
        }
        let is_stale = matches!(self.found[..], [Found { status: STALE, .. }]);
        are_all &= asked.next().is_none();
        if is_stale || are_all { Ok(()) } else { lost("the store has not answered each request") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farside_remote::service::addressed;
    use farside_remote::{Addr, Capabilities, Chain, Reply};
    use std::cell::RefCell;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    /// Nodes that answer each request with its payload and twice its type. Node 9 does not answer.
    #[derive(Default)]
    struct Echo {
        /// Number of entries of each packet that has arrived.
        packets: RefCell<Vec<(u32, usize)>>,
        /// An answer to all packets from now on.
        old: RefCell<Option<Vec<u8>>>,
    }

    impl Fabric for &Echo {
        async fn run(&self, _: NodeId, _: &Chain<'_>, _: &mut Reply) -> Result<(), FabricError> {
            unreachable!("a batch has no chains")
        }

        async fn call(
            &self,
            node: NodeId,
            service: ServiceId,
            request: &[u8],
            answer: &mut Vec<u8>,
        ) -> Result<(), FabricError> {
            if node == NodeId(9) {
                return Err(FabricError::NodeDied(node));
            }
            let (_, packet) = addressed(service, request).expect("a request to a store");
            let (header, entries) = packet::decode(packet, false).expect("a packet");
            self.packets.borrow_mut().push((node.0, entries.clone().count()));
            answer.clear();
            match &*self.old.borrow() {
                Some(old) => answer.extend_from_slice(old),
                None => {
                    packet::begin(&header, true, answer);
                    for entry in entries {
                        let Ok(()) = packet::append(answer, 0, (2 * entry.kind, entry.index), |out| {
                            out.extend_from_slice(entry.payload);
                            Ok::<_, Infallible>(None)
                        });
                    }
                }
            }
            Ok(())
        }

        fn retire(&self, _: NodeId, _: Key, _: Addr) {}

        fn capabilities(&self, _: NodeId) -> Capabilities {
            Capabilities::CALLS
        }
    }

    fn to(node: u32) -> Destination {
        Destination { node: NodeId(node), key: Key::new(5, 6) }
    }

    fn send(batch: &mut Batch, echo: &Echo) {
        let mut sending = pin!(batch.send(&echo));
        assert_eq!(sending.as_mut().poll(&mut Context::from_waker(Waker::noop())), Poll::Ready(()));
    }

    #[test]
    fn requests_to_one_node_share_a_packet_and_each_gets_its_own_response() {
        let (echo, mut batch) = (Echo::default(), Batch::new(3, 4));
        for round in 1..3 {
            batch.clear(round);
            for (place, node) in [1, 9, 2, 1].into_iter().enumerate() {
                let pushed = batch.push(to(node), place as u8 + 1, 8, |out| out.extend([place as u8; 3]));
                assert_eq!(pushed, Some(place));
            }
            send(&mut batch, &echo);
            for place in [0, 2, 3] {
                let wanted = Response { status: 2 * (place as u8 + 1), payload: &[place as u8; 3] };
                assert_eq!(batch.response(place), Ok(wanted));
            }
            assert_eq!(batch.response(1), Err(&FabricError::NodeDied(NodeId(9))));
        }
        assert_eq!(*echo.packets.borrow(), [(1, 2), (2, 1), (1, 2), (2, 1)]);
    }

    #[test]
    fn a_batch_takes_as_many_requests_as_its_packets_can_answer() {
        let mut batch = Batch::new(3, 4);
        batch.clear(1);
        for place in 0..ENTRIES_MAX {
            assert_eq!(batch.push(to(place as u32 % 2), 1, 8, |_| ()), Some(place));
        }
        assert_eq!(batch.push(to(0), 1, 8, |_| ()), None, "the batch is full");
        batch.clear(1);
        assert!(batch.is_empty());
        assert_eq!(batch.push(to(0), 1, 8, |out| out.extend(vec![0; PACKET_MAX])), None, "a long request");
        assert_eq!(batch.push(to(0), 1, PACKET_MAX, |_| ()), None, "a long response");
        assert_eq!(batch.push(to(0), 1, PACKET_MAX / 2, |_| ()), Some(0));
        assert_eq!(batch.push(to(0), 1, PACKET_MAX / 2, |_| ()), None, "two long responses");
        assert_eq!(batch.push(to(1), 1, PACKET_MAX / 2, |_| ()), Some(1), "another packet");
        let echo = Echo::default();
        send(&mut batch, &echo);
        assert!(batch.response(0).is_ok() && batch.response(1).is_ok());
        assert_eq!(*echo.packets.borrow(), [(0, 1), (1, 1)]);
    }

    /// Whether a batch takes the response of the batch before, whose requests were the same.
    fn takes_an_old_response() -> bool {
        let (echo, mut batch) = (Echo::default(), Batch::new(3, 4));
        for _ in 0..2 {
            batch.clear(1);
            batch.push(to(1), 1, 8, |_| ()).expect("a short request");
            send(&mut batch, &echo);
            *echo.old.borrow_mut() = Some(batch.packets[0].answer.clone());
        }
        batch.response(0).is_ok()
    }

    #[test]
    fn the_response_of_an_old_batch_is_not_taken() {
        assert!(!takes_an_old_response());
    }

    #[cfg(farside_mutants)]
    #[test]
    fn a_batch_that_takes_old_responses_is_found() {
        farside_remote::mutant::Mutant::switch(Some(mutants::OLD_RESPONSE_ACCEPTED));
        let takes = takes_an_old_response();
        farside_remote::mutant::Mutant::switch(None);
        assert!(takes);
    }

    #[test]
    fn an_answer_without_all_responses_is_an_error() {
        let (echo, mut batch) = (Echo::default(), Batch::new(3, 4));
        for number in 1..4 {
            batch.clear(1);
            batch.push(to(1), 1, 8, |_| ()).expect("a short request");
            batch.push(to(1), 2, 8, |_| ()).expect("a short request");
            let (mut answer, statuses) = (Vec::new(), [&[2][..], &[2, 4, 6], &[STALE]][number - 1]);
            packet::begin(&batch.header, true, &mut answer);
            for (index, status) in (0..).zip(statuses) {
                let Ok(()) = packet::append(&mut answer, 0, (*status, index), |_| Ok::<_, Infallible>(None));
            }
            *echo.old.borrow_mut() = Some(answer);
            send(&mut batch, &echo);
            let is_stale = (0..2).map(|place| batch.response(place).map(|response| response.status == STALE));
            match number {
                3 => assert!(is_stale.eq([Ok(true), Ok(true)])),
                _ => assert!(is_stale.map(|of| of.map_err(FabricError::ran)).eq([Err(Ran::Unknown); 2])),
            }
        }
    }
}

# A boot sector that uses its disk until the machine ends, as much as a BIOS can, and writes to the serial port: BOOTED,
# a point after each round, E if a request fails, W if the data is wrong.
#
# Sector N of the first areas is filled with the number N. A round reads an area, checks it, writes it elsewhere, reads
# the next area, and then what it has written, which it checks. Only the device writes the memory of the data, and each
# time other data than before: if a migration misses a page, the guest finds it.

    .set FIRST, 2048            # first sector of the areas
    .set AREAS, 32
    .set COPY, 32768            # first sector of the copy
    .set CHUNKS, 24             # requests for an area
    .set CHUNK_SECTORS, 32
    .set AREA_SECTORS, CHUNKS * CHUNK_SECTORS
    .set MEMORY, 0x1000         # segment of the area in memory

    .code16
    .globl _start
_start:
    ljmp $0, $begin
begin:
    xor %ax, %ax
    mov %ax, %ds
    mov %ax, %ss
    mov $0x7c00, %sp
    cld
    mov %dl, drive
    mov $greeting, %si
1:  lodsb
    test %al, %al
    jz round
    call put
    jmp 1b

round:
    call area
    mov $0x42, %ah
    call transfer
    call verify
    push %ebx
    mov $COPY, %ebx
    mov $0x43, %ah
    call transfer
    incw count
    call area
    mov $0x42, %ah
    call transfer
    mov $COPY, %ebx
    call transfer
    pop %ebx
    call verify
    mov $'.', %al
    call put
    jmp round

# The first sector of the area that is next.
area:
    movzwl count, %ebx
    and $(AREAS - 1), %ebx
    imul $AREA_SECTORS, %ebx
    add $FIRST, %ebx
    ret

# Reads (AH = 0x42) or writes (0x43) the area at sector EBX.
transfer:
    movw $MEMORY, packet_segment
    mov %ebx, packet_sector
    mov $CHUNKS, %cx
1:  pusha
    movw $CHUNK_SECTORS, packet_count
    xor %al, %al
    mov drive, %dl
    mov $packet, %si
    int $0x13
    jc fail
    popa
    addw $(CHUNK_SECTORS * 512 / 16), packet_segment
    addl $CHUNK_SECTORS, packet_sector
    loop 1b
    ret

# Checks that the area in memory is that of sector EBX, which stays what it is.
verify:
    mov $MEMORY, %dx
    mov %ebx, %eax
    mov $AREA_SECTORS, %bp
1:  mov %dx, %es
    xor %di, %di
    mov $128, %cx
    repe scasl
    jne wrong
    add $(512 / 16), %dx
    inc %eax
    dec %bp
    jnz 1b
    ret

wrong:
    mov $'W', %al
    jmp 2f
fail:
    mov $'E', %al
2:  call put
1:  hlt
    jmp 1b

# Writes AL to the serial port.
put:
    push %ax
    mov $0x3fd, %dx
1:  in %dx, %al
    test $0x20, %al
    jz 1b
    pop %ax
    mov $0x3f8, %dx
    out %al, %dx
    ret

greeting:
    .asciz "BOOTED"
drive:
    .byte 0
count:
    .word 0
    .balign 4
# The disk address packet of the BIOS's extended reads and writes.
packet:
    .byte 16, 0
packet_count:
    .word 0
    .word 0
packet_segment:
    .word 0
packet_sector:
    .quad 0

    .org 510
    .word 0xaa55

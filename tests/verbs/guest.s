# A guest without an operating system, as a boot sector. It fills 16 MiB with a pattern once. In
# each pass it checks the pattern, and replaces each word of another 4 MiB, which must be the number
# of the previous pass. It prints the number of each pass to the first serial port, or prints
# "wrong" and stops.

    .code16
    .globl _start
_start:
    cli
    xor %ax, %ax
    mov %ax, %ds
    mov %ax, %ss
    mov $0x7c00, %sp
    in $0x92, %al           # enables address line 20
    or $2, %al
    out %al, $0x92
    lgdt table
    mov %cr0, %eax
    or $1, %eax
    mov %eax, %cr0
    ljmp $8, $protected

    .code32
protected:
    mov $16, %ax
    mov %ax, %ds
    mov %ax, %es
    mov %ax, %ss
    cld
    mov $PATTERN, %edi
fill:
    mov %edi, %eax
    xor $SALT, %eax
    stosl
    cmp $PATTERN_END, %edi
    jb fill
    xor %eax, %eax          # the number of the pass
    mov $COUNTERS, %edi
    mov $(COUNTERS_SIZE / 4), %ecx
    rep stosl
    xor %ebp, %ebp
pass:
    mov $PATTERN, %esi
check:
    mov %esi, %edx
    xor $SALT, %edx
    lodsl
    cmp %edx, %eax
    jne wrong
    cmp $PATTERN_END, %esi
    jb check
    mov $COUNTERS, %edi
replace:
    cmp %ebp, (%edi)
    jne wrong
    lea 1(%ebp), %eax
    stosl
    cmp $(COUNTERS + COUNTERS_SIZE), %edi
    jb replace
    inc %ebp
    mov %ebp, %ebx          # prints the pass as eight hexadecimal digits and a line feed
    mov $8, %ecx
digit:
    rol $4, %ebx
    mov %bl, %al
    and $15, %al
    add $'0', %al
    cmp $'9', %al
    jbe decimal
    add $('a' - '9' - 1), %al
decimal:
    call print
    loop digit
    mov $'\n', %al
    call print
    jmp pass

wrong:
    mov $text, %esi
letter:
    lodsb
    test %al, %al
    jz stop
    call print
    jmp letter
stop:
    hlt
    jmp stop

print:                      # prints the character in al
    mov %al, %ah
    mov $(SERIAL + 5), %dx
busy:
    in %dx, %al
    test $0x20, %al
    jz busy
    mov %ah, %al
    mov $SERIAL, %dx
    out %al, %dx
    ret

    .set SERIAL, 0x3f8
    .set SALT, 0x5a5aa5a5
    .set PATTERN, 0x100000
    .set PATTERN_END, 0x1100000
    .set COUNTERS, 0x1100000
    .set COUNTERS_SIZE, 0x400000

text:
    .asciz "wrong\n"
    .balign 8
table:                      # null, code and data of 4 GiB
    .word table_end - descriptors - 1
    .long descriptors
descriptors:
    .quad 0
    .quad 0x00cf9a000000ffff
    .quad 0x00cf92000000ffff
table_end:

    .org 510
    .word 0xaa55
